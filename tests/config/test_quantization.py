# SPDX-License-Identifier: Apache-2.0
"""The options of quantisation: what they become, and what is refused."""

import pytest
import torch

from accelerate.config.quantization import BnbQuantizationConfig
from accelerate.core.enums import CustomDtype


def test_what_is_not_quantised_has_a_dtype():
    eight = BnbQuantizationConfig(load_in_8bit=True)
    assert (eight.torch_dtype, eight.target_dtype, eight.llm_int8_threshold) == (
        torch.float16,
        torch.int8,
        6.0,
    )
    four = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype="bf16", bnb_4bit_quant_type="nf4"
    )
    assert (
        four.torch_dtype == four.bnb_4bit_compute_dtype == torch.bfloat16
        and four.target_dtype == CustomDtype.INT4
    )
    four = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, torch_dtype="fp16"
    )
    assert (four.torch_dtype, four.bnb_4bit_compute_dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "can't be both False"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "can't be both True"),
        ({"load_in_8bit": 3}, "load_in_8bit=3"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": "a"}, "bnb_4bit_use_double_quant='a'"),
        (
            {"load_in_8bit": True, "llm_int8_threshold": "6"},
            "llm_int8_threshold='6' must be a number",
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "x"},
            "bnb_4bit_quant_type='x': use one of fp4, nf4",
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "int8"},
            "bnb_4bit_compute_dtype=torch.int8",
        ),
        ({"load_in_4bit": True, "torch_dtype": 3}, "torch_dtype=3"),
        ({"load_in_8bit": True, "keep_in_fp32_modules": [1]}, "keep_in_fp32_modules contains 1"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BnbQuantizationConfig(**options)


def test_a_threshold_without_8_bits_warns():
    with pytest.warns(UserWarning, match="8bit"):
        BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=3.0)
