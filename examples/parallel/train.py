# SPDX-License-Identifier: Apache-2.0
"""Train one small llama-shaped model in any layout with one unchanged loop, and compare the results.

    python examples/parallel/train.py --save runs/parallel/one                      one process: the reference
    accelerate launch --num_processes 4 examples/parallel/train.py --layout fsdp_tp --compare runs/parallel/one
    accelerate launch --num_processes 2 examples/parallel/train.py --layout pp --model transformers
    python examples/parallel/train.py --list                                        the layouts

All layouts read the same global batches, so that their curves are the same; `--compare` prints how far the parameters
are from those that another run saved. `--explain` shows what became of the model. Nothing in `main` knows the layout.
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
    """What a layout asks of the Accelerator: sizes of the mesh, each a share of the processes, and plugins."""

    about: str
    sizes: dict[str, int] = field(default_factory=dict)  # 0: all processes that the others leave
    fsdp: bool = False
    fsdp_version: int = 2
    zero_stage: int | None = None


LAYOUTS = {
    "data": Layout("a copy on every process (DistributedDataParallel)"),
    "fsdp": Layout("one copy, sharded over all (FSDP2)", {"dp_shard": 0}, fsdp=True),
    "fsdp1": Layout("the same on torch's first FSDP", fsdp=True, fsdp_version=1),
    "hsdp": Layout("two copies, each sharded", {"dp_replicate": 2, "dp_shard": 0}, fsdp=True),
    "tp": Layout("every matrix split over all", {"tp": 0}),
    "dp_tp": Layout("copies of a model split in two", {"dp_replicate": 0, "tp": 2}),
    "fsdp_tp": Layout("a model split in two, its parts sharded", {"dp_shard": 0, "tp": 2}, fsdp=True),
    "cp": Layout("the sequence over all, ring or all-gather attention", {"cp": 0}, fsdp=True),
    "cp_fsdp": Layout("the sequence over two, parameters sharded over all", {"dp_shard": 0, "cp": 2}, fsdp=True),
    "sp": Layout("the sequence over all, all-to-all around attention", {"sp": 0}, fsdp=True),
    "sp_fsdp": Layout("the sequence over two, parameters sharded", {"dp_shard": 0, "sp": 2}, fsdp=True),
    "pp": Layout("the layers over all", {"pp": 0}),
    "pp_dp": Layout("copies of a pipeline of two", {"pp": 2, "dp_replicate": 0}),
    "pp_fsdp": Layout("a pipeline of two, its stages sharded", {"pp": 2, "dp_shard": 0}, fsdp=True),
    "pp_tp": Layout("a pipeline of two, its matrices split", {"pp": 2, "tp": 0}),
    "zero1": Layout("DeepSpeed, optimizer state sharded", zero_stage=1),
    "zero2": Layout("DeepSpeed, gradients too", zero_stage=2),
    "zero3": Layout("DeepSpeed, parameters too", zero_stage=3),
}


def accelerator_options(layout: Layout, processes: int, block: str, clip: float, accumulate: int) -> dict[str, Any]:
    """The arguments of `Accelerator` that ask for a layout. This is all that differs between layouts."""
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
        options["parallelism_config"] = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()})
    if layout.fsdp:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=layout.fsdp_version,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[block],
        )
    return options


# ----------------------------------------------------------------------------------------------------- model and data


def make_model(kind: str, length: int) -> tuple[torch.nn.Module, str]:
    """(model, the class of its repeated blocks): the one in llama.py, or one of transformers' from a configuration."""
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
    """Windows of `length` bytes of the source of llama.py, and the same moved on by one."""

    def __init__(self, length: int) -> None:
        text = Path(__file__).with_name("llama.py").read_bytes()
        self.data, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), length

    def __len__(self) -> int:
        # A number that the default batches and accumulation divide: no window of an epoch stays short.
        return (len(self.data) - 1) // self.length // 32 * 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.data[index * self.length : (index + 1) * self.length + 1]
        return {"input_ids": window[:-1], "labels": window[1:], "position_ids": torch.arange(self.length)}


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
        # The batch size of the loader is that of all processes together, whatever share of them reads data.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        **accelerator_options(
            LAYOUTS[arguments.layout], PartialState().num_processes, block, arguments.clip, arguments.accumulate
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
                    buffers=list(batch.values()), buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(batch.values())
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
        known = load_file(Path(arguments.compare) / "parameters.safetensors")
        far = max((state[name].cpu() - value).abs().max().item() for name, value in known.items())
        print(f"{arguments.layout}: parameters differ by at most {far:.2e} from {arguments.compare}")
    if arguments.save:
        Path(arguments.save).mkdir(parents=True, exist_ok=True)
        plain = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        save_file(plain, Path(arguments.save) / "parameters.safetensors")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__[__doc__.index("\n\n") + 2 :],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="data", help="(%(default)s)")
    parser.add_argument("--list", action="store_true", help="show the layouts")
    parser.add_argument("--model", choices=("own", "transformers"), default="own", help="(%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of the weights")
    parser.add_argument("--mixed_precision", choices=("no", "bf16", "fp16"), help="default: the launcher's, else no")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="batches a step (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="windows a batch, of all processes (%(default)s)")
    parser.add_argument("--length", type=int, default=64, help="bytes a window (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="(%(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="norm that gradients are cut to (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--log_every", type=int, default=5, help="steps (%(default)s)")
    parser.add_argument("--explain", action="store_true", help="show at the end what became of the model")
    parser.add_argument("--save", help="folder for the trained parameters")
    parser.add_argument("--compare", help="folder of another run's parameters")
    parser.add_argument("--checkpoint", help="folder for the state of the run, which any layout loads")
    parser.add_argument("--load", help="folder of such a state to begin from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
