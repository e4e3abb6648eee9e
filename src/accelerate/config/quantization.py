# SPDX-License-Identifier: Apache-2.0
"""How the weights of a model are quantized by bitsandbytes: to 8 or 4 bits, and what stays as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..core.enums import CustomDtype
from ..core.errors import ConfigurationError
from ..core.messages import warn
from . import checks


@dataclass
class BnbQuantizationConfig:
    """Options of `load_and_quantize_model`. Set exactly one of `load_in_8bit` and `load_in_4bit`.

    Fields:
        load_in_8bit: quantize linear layers to 8 bits.
        llm_int8_threshold: activations above it are computed in 16 bits. Only with 8 bits.
        load_in_4bit: quantize linear layers to 4 bits.
        bnb_4bit_quant_type: the 4-bit type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: quantize the scales as well.
        bnb_4bit_compute_dtype: dtype in which 4-bit layers compute.
        torch_dtype: dtype of the layers that are not quantized. Default: fp16 with 8 bits,
            `bnb_4bit_compute_dtype` with 4 bits.
        skip_modules: names of modules that are not quantized. Default: the output layer, and layers tied to it.
        keep_in_fp32_modules: names of modules that stay in float32.

    Raises:
        ConfigurationError: a value cannot be used.
    """

    load_in_8bit: bool = field(default=False, metadata={"help": "quantize to 8 bits"})
    llm_int8_threshold: float = field(
        default=6.0, metadata={"help": "activations above it are computed in 16 bits"}
    )
    load_in_4bit: bool = field(default=False, metadata={"help": "quantize to 4 bits"})
    bnb_4bit_quant_type: str = field(default="fp4", metadata={"help": "the 4-bit type: fp4 or nf4"})
    bnb_4bit_use_double_quant: bool = field(
        default=False, metadata={"help": "quantize the scales as well"}
    )
    bnb_4bit_compute_dtype: Any = field(
        default="fp16", metadata={"help": "the dtype in which 4-bit layers compute"}
    )
    torch_dtype: Any = field(
        default=None, metadata={"help": "dtype of the layers that are not quantized"}
    )
    skip_modules: list[str] | None = field(
        default=None, metadata={"help": "modules that are not quantized"}
    )
    keep_in_fp32_modules: list[str] | None = field(
        default=None, metadata={"help": "modules that stay in fp32"}
    )

    def __post_init__(self) -> None:
        import torch

        checks.fields_of(self)
        if bool(self.load_in_8bit) == bool(self.load_in_4bit):
            raise ConfigurationError(
                f"load_in_4bit and load_in_8bit can't be both {self.load_in_8bit}"
            )
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warn("llm_int8_threshold can only be used for model loaded in 8bit")
        self.bnb_4bit_quant_type = checks.word(
            "bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("fp4", "nf4")
        )
        for name in ("skip_modules", "keep_in_fp32_modules"):
            if getattr(self, name) is not None:
                setattr(self, name, checks.texts(name, getattr(self, name)))
        self.bnb_4bit_compute_dtype = checks.dtype(
            "bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype
        )
        if self.load_in_4bit:
            default = self.bnb_4bit_compute_dtype
        else:
            default = torch.float16
        self.torch_dtype = checks.dtype("torch_dtype", self.torch_dtype) or default
        # What the quantized weights count as when memory is planned.
        self.target_dtype: Any = CustomDtype.INT4 if self.load_in_4bit else torch.int8
