# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama in any parallel layout with the same loop, and compare the results.

    python examples/parallel/train.py --save runs/parallel/one                      reference: one process
    accelerate launch --num_processes 4 examples/parallel/train.py --layout fsdp_tp --compare runs/parallel/one
    accelerate launch --num_processes 2 examples/parallel/train.py --layout pp --model transformers
    python examples/parallel/train.py --list                                        list the layouts

All layouts read the same global batches, so their loss curves are the same. `--compare` prints the largest difference
from the parameters that another run saved. `--explain` prints the layout of the prepared model and its memory.
`main` contains no code for a specific layout.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from llama import Llama, LlamaConfig
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed

# ------------------------------------------------------------------------------------------------------------- layouts


@dataclass
class Layout:
    """The mesh and the plugins of a layout."""

    about: str
    sizes: dict[str, int] = field(
        default_factory=dict
    )  # mesh dimensions; 0: all remaining processes
    fsdp: bool = False
    fsdp_version: int = 2
    zero_stage: int | None = None


LAYOUTS = {
    "data": Layout("model replicated on every process (DistributedDataParallel)"),
    "fsdp": Layout("model sharded over all processes (FSDP2)", {"dp_shard": 0}, fsdp=True),
    "fsdp1": Layout("model sharded over all processes (FSDP1)", fsdp=True, fsdp_version=1),
    "hsdp": Layout("two replicas, each sharded", {"dp_replicate": 2, "dp_shard": 0}, fsdp=True),
    "tp": Layout("matrices split over all processes", {"tp": 0}),
    "dp_tp": Layout("replicas, each with matrices split in two", {"dp_replicate": 0, "tp": 2}),
    "fsdp_tp": Layout("matrices split in two, then sharded", {"dp_shard": 0, "tp": 2}, fsdp=True),
    "cp": Layout(
        "sequence split over all processes, ring or all-gather attention", {"cp": 0}, fsdp=True
    ),
    "cp_fsdp": Layout(
        "sequence split in two, parameters sharded over all processes",
        {"dp_shard": 0, "cp": 2},
        fsdp=True,
    ),
    "sp": Layout(
        "sequence split over all processes, all-to-all around attention", {"sp": 0}, fsdp=True
    ),
    "sp_fsdp": Layout(
        "sequence split in two, parameters sharded", {"dp_shard": 0, "sp": 2}, fsdp=True
    ),
    "pp": Layout("one pipeline stage per process", {"pp": 0}),
    "pp_dp": Layout("replicas of a two-stage pipeline", {"pp": 2, "dp_replicate": 0}),
    "pp_fsdp": Layout(
        "a two-stage pipeline, each stage sharded", {"pp": 2, "dp_shard": 0}, fsdp=True
    ),
    "pp_tp": Layout("a two-stage pipeline, matrices split", {"pp": 2, "tp": 0}),
    "zero1": Layout("DeepSpeed ZeRO-1: optimizer state sharded", zero_stage=1),
    "zero2": Layout("DeepSpeed ZeRO-2: gradients sharded too", zero_stage=2),
    "zero3": Layout("DeepSpeed ZeRO-3: parameters sharded too", zero_stage=3),
}


def accelerator_options(
    layout: Layout, processes: int, block: str, clip: float, accumulate: int
) -> dict[str, Any]:
    """Return the `Accelerator` arguments of a layout, the only difference between layouts."""
    if layout.zero_stage is not None:
        from accelerate.utils import DeepSpeedPlugin

        return {
            "deepspeed_plugin": DeepSpeedPlugin(
                zero_stage=layout.zero_stage,
                gradient_clipping=clip,
                gradient_accumulation_steps=accumulate,
                zero3_save_16bit_model=True,  # `get_state_dict` gathers the sharded weights
            )
        }
    options: dict[str, Any] = {}
    sizes = dict(layout.sizes)
    for name, size in sizes.items():
        if size == 0:
            fixed = 1
            for other in sizes.values():
                fixed *= max(other, 1)
            sizes[name] = max(processes // fixed, 1)
    if sizes:
        options["parallelism_config"] = ParallelismConfig(
            **{f"{name}_size": size for name, size in sizes.items()}
        )
    if layout.fsdp:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=layout.fsdp_version,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[block],
        )
    return options


# ----------------------------------------------------------------------------------------------------- model and data


def make_model(kind: str, length: int) -> tuple[torch.nn.Module, str]:
    """Return the model, from llama.py or from transformers, and the class name of its blocks."""
    if kind == "own":
        return Llama(LlamaConfig()), "Block"
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=length,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), "LlamaDecoderLayer"


class Windows(Dataset):
    """Windows of `length` bytes of llama.py. The labels are the same windows shifted by one byte."""

    def __init__(self, length: int) -> None:
        text = Path(__file__).with_name("llama.py").read_bytes()
        self.data, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), length

    def __len__(self) -> int:
        # A multiple of 32, so that the default batches and accumulation steps divide an epoch evenly.
        return (len(self.data) - 1) // self.length // 32 * 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.data[index * self.length : (index + 1) * self.length + 1]
        return {
            "input_ids": window[:-1],
            "labels": window[1:],
            "position_ids": torch.arange(self.length),
        }


# ----------------------------------------------------------------------------------------------------------- the loop


def main() -> None:
    arguments = parse_arguments()
    if arguments.list:
        print("\n".join(f"{name:<9} {layout.about}" for name, layout in LAYOUTS.items()))
        return
    set_seed(arguments.seed)
    model, block = make_model(arguments.model, arguments.length)
    model.to(getattr(torch, arguments.dtype))
    accelerator = Accelerator(
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.accumulate,
        # batch_size is the global batch size in every layout, and the seed determines the order of the data.
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        **accelerator_options(
            LAYOUTS[arguments.layout],
            PartialState().num_processes,
            block,
            arguments.clip,
            arguments.accumulate,
        ),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    data = Windows(arguments.length)
    loader = DataLoader(data, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    if arguments.load:
        accelerator.load_state(arguments.load)

    step = 0
    while step < arguments.steps:
        for batch in loader:
            with (
                accelerator.accumulate(model),
                accelerator.maybe_context_parallel(
                    buffers=list(batch.values()),
                    buffer_seq_dims=[1, 1, 1],
                    no_restore_buffers=set(batch.values()),
                ),
            ):
                output = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
                logits = output if isinstance(output, torch.Tensor) else output.logits
                loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), arguments.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                mean = accelerator.reduce(loss.detach(), "mean").item()
                if step % arguments.log_every == 0 or step == 1:
                    accelerator.print(f"step {step:>4}  loss {mean:.6f}")
            if step == arguments.steps:
                break

    if arguments.explain:
        accelerator.explain(all_ranks=True)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        compare_and_save(state, arguments)
    if arguments.checkpoint:
        accelerator.save_state(arguments.checkpoint)
    accelerator.end_training()


def compare_and_save(state: dict[str, torch.Tensor], arguments: argparse.Namespace) -> None:
    if arguments.compare:
        expected = load_file(Path(arguments.compare) / "parameters.safetensors")
        difference = max(
            (state[name].cpu() - value).abs().max().item() for name, value in expected.items()
        )
        print(
            f"{arguments.layout}: parameters differ by at most {difference:.2e} from {arguments.compare}"
        )
    if arguments.save:
        Path(arguments.save).mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        save_file(tensors, Path(arguments.save) / "parameters.safetensors")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__[__doc__.index("\n\n") + 2 :],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="data", help="(default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the layouts and exit")
    parser.add_argument(
        "--model", choices=("own", "transformers"), default="own", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float64"), default="float32", help="dtype of the weights"
    )
    parser.add_argument(
        "--mixed_precision", choices=("no", "bf16", "fp16"), help="default: the launcher's, else no"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        default=2,
        help="gradient accumulation steps (default: %(default)s)",
    )
    parser.add_argument(
        "--batch_size", type=int, default=8, help="global batch size (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=int, default=64, help="sequence length (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="(default: %(default)s)")
    parser.add_argument(
        "--clip", type=float, default=1.0, help="maximum gradient norm (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--log_every", type=int, default=5, help="steps between log lines (default: %(default)s)"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print the layout and the memory of the prepared model",
    )
    parser.add_argument("--save", help="folder to save the trained parameters to")
    parser.add_argument("--compare", help="folder of parameters to compare with")
    parser.add_argument(
        "--checkpoint", help="folder to save the training state to; any layout can load it"
    )
    parser.add_argument("--load", help="folder to load the training state from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
