# SPDX-License-Identifier: Apache-2.0
"""QLoRA: the base in 4 bits of bitsandbytes (NF4), and adapters of peft in fp32 on top of it.

    python examples/fine_tuning/qlora.py
    accelerate launch --num_processes 2 examples/fine_tuning/qlora.py
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 examples/fine_tuning/qlora.py

The loop is that of `lora.py`. The checkpoint has the adapter, and checksums of the quantized base.
"""

import argparse
from pathlib import Path

import bitsandbytes
import torch
from lora import base, train
from peft import LoraConfig, get_peft_model

from accelerate import PartialState


def quantized(model: torch.nn.Module) -> torch.nn.Module:
    """The model on this process's device, with its linear layers, except the output layer, in 4 bits."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                # FSDP2 shards the default, packed bytes, on torch 2.12 or later only.
                options = {
                    "quant_type": "nf4",
                    "compute_dtype": torch.float32,
                    "quant_storage": torch.float32,
                }
                small = bitsandbytes.nn.Linear4bit(
                    layer.in_features, layer.out_features, bias=False, **options
                )
                small.load_state_dict(layer.state_dict())
                setattr(parent, name, small)
    model.is_loaded_in_4bit = True
    return model.to(
        PartialState().device
    )  # which quantizes; `prepare` does not move quantized models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--output", type=Path, default=Path("runs/qlora"), help="folder for what is saved"
    )
    args = parser.parse_args()
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    train(get_peft_model(quantized(base()).requires_grad_(False), config), args.output, merge=False)


if __name__ == "__main__":
    main()
