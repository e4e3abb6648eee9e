# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT to read dates: "the 3rd of march 1998" is 1998-03-03.

    python examples/train_gpt.py                                        one process
    accelerate launch --num_processes 2 examples/train_gpt.py           two processes: a minute on two cores
    torchrun --nproc_per_node 2 examples/train_gpt.py                   two processes, started by torchrun
    accelerate launch --num_processes 2 examples/train_gpt.py --resume  resume from the newest checkpoint

The model sees single characters, and is tested on days that it was not trained on. The lines marked [1] to [5] are the
Accelerate calls for any device and any number of processes. The rest is plain PyTorch. Checkpoints, logged values and
the trained weights go to `runs/gpt`. With `--output_dir s3://bucket/runs/gpt` the checkpoints go to the bucket.
"""

from __future__ import annotations

import argparse
import math
import os
import zlib
from collections.abc import Iterable
from datetime import date, timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

# A sample is a date in one of the styles, padded on the left to QUESTION characters, and the ISO date.
QUESTION, ANSWER, CHARACTERS = 34, 10, 128

# ----------------------------------------------------------------------------------------------------------- arguments


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__[__doc__.index("\n\n") + 2 :],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, default: object, help: str, type: type = int) -> None:
        parser.add_argument(name, type=type, default=default, help=f"{help} (default: %(default)s)")

    add(
        "--output_dir",
        "runs/gpt",
        "folder of the run, or the place of its checkpoints in a bucket",
        str,
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume from the newest checkpoint in --output_dir"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="use the CPU even if an accelerator is available"
    )
    parser.add_argument(
        "--mixed_precision",
        choices=["no", "bf16", "fp16"],
        help="default: the setting of the launcher, else no",
    )
    add("--max_steps", 1000, "optimizer steps")
    add("--batch_size", 32, "samples per process and forward")
    add("--accumulate", 1, "gradient accumulation steps")
    add("--lr", 6e-3, "peak learning rate", float)
    add("--warmup", 30, "warmup steps")
    add("--clip", 1.0, "maximum gradient norm", float)
    add("--layers", 3, "blocks of the model")
    add("--width", 64, "size of the hidden state")
    add("--heads", 4, "attention heads")
    add("--seed", 0, "seed of the weights and the data order")
    add("--log_every", 10, "steps between logged losses")
    add("--eval_every", 250, "steps between evaluations")
    add("--eval_samples", 512, "held-out dates of an evaluation")
    add("--save_every", 250, "steps between checkpoints")
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not divisible by --heads {args.heads}")
    folder = Path(args.output_dir)
    if not args.resume and folder.is_dir() and any(folder.iterdir()):
        raise SystemExit(
            f"{args.output_dir} has the files of a run: pass --resume, or another --output_dir"
        )
    return args


# ---------------------------------------------------------------------------------------------------------------- data


def ordinal(day: int) -> str:
    return f"{day}{'th' if 10 < day < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"


STYLES = (
    lambda day: f"{day:%B} {ordinal(day.day)}, {day.year}",
    lambda day: f"the {ordinal(day.day)} of {day:%B} {day.year}",
    lambda day: f"{day:%A}, {day.day} {day:%B} {day.year}",
    lambda day: f"{day.day} {day:%b} {day.year}",
    lambda day: f"{day:%b} {day.day} '{day:%y}",
    lambda day: f"{day.month}/{day.day}/{day.year}",
    lambda day: f"{day.day}.{day.month}.{day.year}",
)


class Dates(Dataset):
    """The days of 1970 to 2069 in each style: those to train on, or the held-out tenth.

    A hash of the day decides, so the split is the same on every run.
    """

    def __init__(self, held_out: bool, count: int | None = None) -> None:
        first = date(1970, 1, 1)
        days = (first + timedelta(number) for number in range((date(2070, 1, 1) - first).days))
        self.days = [
            day for day in days if (zlib.crc32(day.isoformat().encode()) % 10 == 0) == held_out
        ]
        total = len(self.days) * len(STYLES)
        # All samples, or `count` of them that are evenly spaced.
        self.indices = range(total) if count is None else [i * total // count for i in range(count)]

    def __len__(self) -> int:
        return len(self.indices)

    def day(self, index: int) -> date:
        return self.days[self.indices[index] // len(STYLES)]

    def question(self, index: int) -> str:
        return STYLES[self.indices[index] % len(STYLES)](self.day(index)).lower()

    def __getitem__(self, index: int) -> torch.Tensor:
        text = self.question(index).rjust(QUESTION) + self.day(index).isoformat()
        return torch.tensor(list(text.encode("ascii")))


# --------------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.qkv(self.norm_attention(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Map (batch, time) characters to (batch, time, CHARACTERS) logits of the next character."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(CHARACTERS, width),
            nn.Embedding(QUESTION + ANSWER, width),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:  # each block starts as the identity
            nn.init.zeros_(block.out.weight)
            nn.init.zeros_(block.down.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)  # input and output share the embedding


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the characters of the answers."""
    logits = model(tokens[:, :-1])[:, QUESTION - 1 :]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, QUESTION:].flatten())


@torch.no_grad()
def answer(model: nn.Module, questions: torch.Tensor) -> torch.Tensor:
    """Append the ANSWER most probable characters to each question."""
    tokens = questions
    for _ in range(ANSWER):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return tokens


# ------------------------------------------------------------------------------------------------------------ training


class Progress:
    """The steps that the run has made. It is registered, so checkpoints contain it."""

    step = 0

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


def evaluate(accelerator: Accelerator, model: nn.Module, loader: Iterable[torch.Tensor]) -> float:
    """Return the share of held-out dates that are right in every character, each counted once."""
    model.eval()
    right = [
        accelerator.gather_for_metrics(
            (answer(model, tokens[:, :QUESTION]) == tokens).all(dim=1)
        )  # [5]
        for tokens in loader
    ]
    model.train()
    return torch.cat(right).float().mean().item()


def rate(step: int, warmup: int, steps: int) -> float:
    """Return the learning rate factor: linear warmup, then cosine decay to 5%."""
    if step < warmup:
        return (step + 1) / warmup
    fraction = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))


def train(
    args, accelerator, model, optimizer, scheduler, loader, eval_loader, progress: Progress
) -> None:
    """Train up to --max_steps. Log, evaluate and save at the intervals of the arguments."""
    losses = []
    while progress.step < args.max_steps:
        for tokens in loader:  # in the epoch of a checkpoint: the batches that are left
            with accelerator.accumulate(model):  # [3]
                loss = loss_of(model, tokens)
                accelerator.backward(loss)  # [4]
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            progress.step += 1
            last = progress.step == args.max_steps
            evaluates = last or progress.step % args.eval_every == 0
            if evaluates or progress.step % args.log_every == 0:
                mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
                losses.clear()
                accelerator.log({"loss": mean}, step=progress.step)
            if evaluates:
                accuracy = evaluate(accelerator, model, eval_loader)
                accelerator.log({"held-out accuracy": accuracy}, step=progress.step)
                accelerator.print(
                    f"step {progress.step:4d}   loss {mean:.4f}   held-out accuracy {accuracy:.1%}"
                )
            if last or progress.step % args.save_every == 0:
                accelerator.save_state()
            if last:
                return


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(  # [1]
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        project_config=ProjectConfiguration(
            args.output_dir, automatic_checkpoint_naming=True, total_limit=2
        ),
        exact=True,  # each sample counts once per epoch, even if the last batch is short
        step_scheduler_with_optimizer=False,  # the scheduler counts optimizer steps, not batches of all processes
    )
    set_seed(args.seed)
    model = GPT(args.width, args.layers, args.heads)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate(step, args.warmup, args.max_steps)
    )
    loader = DataLoader(Dates(held_out=False), args.batch_size, shuffle=True)
    eval_loader = DataLoader(Dates(held_out=True, count=args.eval_samples), 4 * args.batch_size)
    model, optimizer, scheduler, loader, eval_loader = accelerator.prepare(  # [2]
        model, optimizer, scheduler, loader, eval_loader
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.init_trackers(
        "train_gpt", config={name: str(value) for name, value in vars(args).items()}
    )
    # Loads the newest checkpoint, if there is one. From here on SIGTERM and SIGUSR1 save one.
    if accelerator.resume() is None and args.resume:
        accelerator.print(f"no checkpoint in {args.output_dir}: starting from step 0")
    train(args, accelerator, model, optimizer, scheduler, loader, eval_loader, progress)
    # With checkpoints in a bucket, `logging_dir` is a local folder. Otherwise it is --output_dir.
    accelerator.save_model(model, os.path.join(accelerator.logging_dir, "model"))
    if accelerator.is_main_process:
        show_answers(accelerator.unwrap_model(model).eval())
    accelerator.end_training()


def show_answers(model: GPT) -> None:
    """Print held-out dates, one in each style, with the model's answers."""
    dates = Dates(held_out=True)
    table = Table(
        title="Days that the model was not trained on", title_justify="left", title_style="bold"
    )
    for title in ("question", "answer", ""):
        table.add_column(title)
    for style in range(len(STYLES)):
        # An early day in the first style, a late one in the last.
        index = len(dates.days) * style // len(STYLES) * len(STYLES) + style
        tokens = dates[index][None].to(model.embed.weight.device)
        answered = answer(model, tokens[:, :QUESTION])
        text = bytes(answered[0, QUESTION:].tolist()).decode("ascii", errors="replace")
        table.add_row(
            dates.question(index), text, "right" if torch.equal(answered, tokens) else "wrong"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
