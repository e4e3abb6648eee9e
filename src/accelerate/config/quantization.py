# SPDX-License-Identifier: Apache-2.0
"""How the weights of a model are quantised by bitsandbytes: to 8 or 4 bits, and what stays as it is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from ..core.enums import SHORT_DTYPES, CustomDtype
from ..core.errors import ConfigurationError
from ..core.retired import explained


@explained
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

    load_in_8bit: bool = field(default=False, metadata={"help": "quantise to 8 bits"})
    llm_int8_threshold: float = field(default=6.0, metadata={"help": "activations above it are computed in 16 bits"})
    load_in_4bit: bool = field(default=False, metadata={"help": "quantise to 4 bits"})
    bnb_4bit_quant_type: str = field(default="fp4", metadata={"help": "the 4-bit type: fp4 or nf4"})
    bnb_4bit_use_double_quant: bool = field(default=False, metadata={"help": "quantise the scales as well"})
    bnb_4bit_compute_dtype: Any = field(default="fp16", metadata={"help": "what 4-bit layers compute in"})
    torch_dtype: Any = field(default=None, metadata={"help": "dtype of the layers that are not quantised"})
    skip_modules: list[str] | None = field(default=None, metadata={"help": "modules that are not quantised"})
    keep_in_fp32_modules: list[str] | None = field(default=None, metadata={"help": "modules kept in fp32"})

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} must be a boolean")
        if self.load_in_8bit == self.load_in_4bit:
            both = "True" if self.load_in_8bit else "False"
            raise ConfigurationError(f"load_in_4bit and load_in_8bit can't be both {both}")
        if isinstance(self.llm_int8_threshold, bool) or not isinstance(self.llm_int8_threshold, (int, float)):
            raise ConfigurationError("llm_int8_threshold must be a float or an int")
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warnings.warn("llm_int8_threshold can only be used for model loaded in 8bit")
        if not isinstance(self.bnb_4bit_quant_type, str):
            raise ConfigurationError("bnb_4bit_quant_type must be a string")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigurationError(
                f"bnb_4bit_quant_type must be in ['fp4','nf4'] but found {self.bnb_4bit_quant_type}"
            )
        for name in ("skip_modules", "keep_in_fp32_modules"):
            names = getattr(self, name)
            if names is not None and not (isinstance(names, list) and all(isinstance(part, str) for part in names)):
                raise ConfigurationError(f"{name} must be a list of strings")
        self._resolve_dtypes()

    def _resolve_dtypes(self) -> None:
        import torch

        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        else:
            self.torch_dtype = _dtype("torch_dtype", self.torch_dtype)
        # What the quantised weights count as when memory is planned.
        self.target_dtype: Any = CustomDtype.INT4 if self.load_in_4bit else torch.int8


def _dtype(name: str, value: Any) -> Any:
    """A torch dtype from the option `name`: one, or its short name."""
    import torch

    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be a string or a torch.dtype")
    if value not in SHORT_DTYPES:
        raise ConfigurationError(f"{name} must be in ['fp32','fp16','bf16'] but found {value}")
    return getattr(torch, SHORT_DTYPES[value])
