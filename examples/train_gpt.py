# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT, byte by byte, on the Python sources of this interpreter's standard library.

    python examples/train_gpt.py                                        one process
    accelerate launch --num_processes 2 examples/train_gpt.py           two processes, a minute or two on two cores
    torchrun --nproc_per_node 2 examples/train_gpt.py                   the same, started by torchrun
    accelerate launch --num_processes 2 examples/train_gpt.py --resume  go on from the newest checkpoint

Everything is plain PyTorch but the lines marked [1] to [5]: these five are what makes it run on any device and any
number of processes. It writes to `runs/gpt`: checkpoints, TensorBoard logs, the loss curve and the trained weights.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sysconfig
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich import progress
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

BYTES = 256  # the vocabulary: every byte is a token

# ----------------------------------------------------------------------------------------------------------- arguments


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__[__doc__.index("\n\n") + 2 :],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--output_dir", type=Path, default=Path("runs/gpt"), help="where everything goes (%(default)s)")
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --output_dir")
    run.add_argument("--save_every", type=positive(int), default=250, help="steps between checkpoints (%(default)s)")
    run.add_argument("--eval_every", type=positive(int), default=100, help="steps between evaluations (%(default)s)")
    run.add_argument("--log_every", type=positive(int), default=10, help="steps between log entries (%(default)s)")
    run.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data (%(default)s)")
    run.add_argument("--cpu", action="store_true", help="stay on the CPU where there is an accelerator")
    optim = parser.add_argument_group("optimization")
    optim.add_argument("--max_steps", type=positive(int), default=1000, help="optimizer steps (%(default)s)")
    optim.add_argument("--batch_size", type=positive(int), default=4, help="windows a process and pass (%(default)s)")
    optim.add_argument("--accumulate", type=positive(int), default=2, help="passes an optimizer step (%(default)s)")
    optim.add_argument("--lr", type=positive(float), default=6e-3, help="highest learning rate (%(default)s)")
    optim.add_argument("--warmup", type=positive(int), default=30, help="steps up to it (%(default)s)")
    optim.add_argument(
        "--clip", type=positive(float), default=1.0, help="norm that gradients are cut to (%(default)s)"
    )
    optim.add_argument(
        "--mixed_precision",
        choices=["no", "bf16", "fp16"],
        help="default: what the launcher was told, else no",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=positive(int), default=3, help="(%(default)s)")
    model.add_argument("--width", type=positive(int), default=96, help="(%(default)s)")
    model.add_argument("--heads", type=positive(int), default=4, help="(%(default)s)")
    model.add_argument("--context", type=positive(int), default=128, help="bytes it looks back (%(default)s)")
    data = parser.add_argument_group("data")
    data.add_argument("--eval_windows", type=positive(int), default=256, help="of held-out files (%(default)s)")
    data.add_argument("--sample_bytes", type=int, default=400, help="text generated at the end (%(default)s)")
    arguments = parser.parse_args()
    if arguments.width % arguments.heads:
        parser.error(f"--width {arguments.width} does not divide by --heads {arguments.heads}")
    return arguments


def positive(kind: type):
    """An argparse type: a number above zero."""

    def parse(text: str):
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


# ---------------------------------------------------------------------------------------------------------------- data


def standard_library(held_out: bool) -> torch.Tensor:
    """The sources of nine files in ten, or of the tenth, as one tensor of bytes. The choice depends on names alone."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings", "pydoc_data"}
    parts = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not left_out.intersection(name.parts) and (zlib.crc32(name.as_posix().encode()) % 10 == 0) == held_out:
            parts.append(path.read_bytes())
    if not parts:
        raise SystemExit(f"no sources of the standard library in {root}: this example needs an unpacked Python")
    return torch.frombuffer(bytearray(b"\n\n".join(parts)), dtype=torch.uint8)


class Windows(Dataset):
    """Consecutive windows of a tensor of bytes: `context` bytes, and the same moved on by one."""

    def __init__(self, data: torch.Tensor, context: int, count: int | None = None) -> None:
        whole = (len(data) - 1) // context
        if not whole:
            raise SystemExit(f"--context {context} is longer than the text ({len(data)} bytes)")
        self.data, self.context = data, context
        # `count` windows evenly over the text, or all of them
        self.begins = (
            [i * whole // count * context for i in range(count)] if count else range(0, whole * context, context)
        )

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.data[self.begins[index] : self.begins[index] + self.context + 1].long()
        return window[:-1], window[1:]


# --------------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """Attention to the bytes before, then a two-layer perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """(batch, time) bytes in, (batch, time, 256) logits of the byte that follows each out."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embed, self.position = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:  # each block begins as the identity
            nn.init.zeros_(block.out.weight)
            nn.init.zeros_(block.down.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)  # the embedding serves both ends

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float, generator: torch.Generator) -> bytes:
        tokens = torch.tensor([list(prompt)], device=self.embed.weight.device)
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[0, -1].float().cpu()
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen[None].to(tokens.device)], dim=1)
        return bytes(tokens[0].tolist())


def loss_of(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Nats a byte."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


# ------------------------------------------------------------------------------------------------------------ training


@dataclass
class Position:
    """Where the run is. Registered for checkpointing, so that a resumed run knows as much as an uninterrupted one."""

    step: int = 0
    epoch: int = 0
    samples: int = 0  # of this epoch, on all processes
    tokens: int = 0  # on all processes
    seconds: float = 0.0  # spent on training steps
    train: list[list[float]] = field(default_factory=list)  # pairs of step and loss
    held_out: list[list[float]] = field(default_factory=list)

    def state_dict(self) -> dict:
        return asdict(self)

    def load_state_dict(self, state: dict) -> None:
        self.__dict__.update(state)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Mean loss over the held-out windows: every one counts once, on any number of processes."""
    model.eval()
    losses = []
    for inputs, targets in loader:
        each = loss_of(model(inputs), targets, reduction="none").view(targets.shape).mean(dim=1)
        losses.append(accelerator.gather_for_metrics(each))  # [5]
    model.train()
    return torch.cat(losses).mean().item()


def rate(step: int, warmup: int, steps: int) -> float:
    """The share of the highest learning rate: up in a line, down in half a cosine to a twentieth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def train(args, accelerator, model, optimizer, scheduler, loader, eval_loader, position: Position, bar) -> None:
    """Optimizer steps up to --max_steps, with an evaluation, a log entry and a checkpoint each so many."""
    global_batch = args.batch_size * accelerator.num_processes
    recent, passes = torch.zeros((), device=accelerator.device), 0
    clock = time.perf_counter()
    while position.step < args.max_steps:
        loader.set_epoch(position.epoch)  # the order of the data follows from the seed and the epoch
        for inputs, targets in accelerator.skip_first_batches(loader, position.samples // global_batch):
            with accelerator.accumulate(model):  # [3]
                loss = loss_of(model(inputs), targets)
                accelerator.backward(loss)  # [4]
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                optimizer.zero_grad()
            position.samples += global_batch
            position.tokens += global_batch * args.context
            recent, passes = recent + loss.detach(), passes + 1
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            position.step += 1
            if position.step % args.log_every == 0:
                mean = accelerator.reduce(recent / passes, reduction="mean").item()
                recent, passes = torch.zeros_like(recent), 0
                position.train.append([position.step, mean])
                accelerator.log({"loss/train": mean, "lr": scheduler.get_last_lr()[0]}, step=position.step)
            bar(position)
            last = position.step == args.max_steps
            if last or position.step % args.eval_every == 0 or position.step % args.save_every == 0:
                position.seconds += time.perf_counter() - clock
                if last or position.step % args.eval_every == 0:
                    log_held_out(accelerator, position, evaluate(accelerator, model, eval_loader))
                if last or position.step % args.save_every == 0:
                    accelerator.save_state()
                clock = time.perf_counter()
            if last:
                return
        position.epoch, position.samples = position.epoch + 1, 0


def log_held_out(accelerator: Accelerator, position: Position, loss: float) -> None:
    position.held_out.append([position.step, loss])
    accelerator.log({"loss/held_out": loss}, step=position.step)
    accelerator.print(f"step {position.step:5d}   loss on held-out files {loss:.4f} nats a byte")


# -------------------------------------------------------------------------------------------------------------- report


def draw(position: Position, path: Path) -> str:
    """The loss curve as a picture; what to say about it."""
    try:
        import matplotlib
    except ImportError:
        return "not drawn: pip install matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes.plot(*zip(*position.train, strict=True), color="#8ab4d8", linewidth=1.5, label="training")
    axes.plot(*zip(*position.held_out, strict=True), color="#c0392b", marker="o", markersize=4, label="held-out files")
    axes.axhline(math.log(BYTES), color="#999999", linestyle=":", label="guessing, ln 256")
    axes.set(
        xlabel="optimizer step", ylabel="loss (nats a byte)", title="A small GPT on the standard library's sources"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
    return str(path)


def report(args, accelerator, model: GPT, position: Position, wall: float) -> None:
    """Table, picture and sample, on the main process."""
    (_, before), (_, after) = position.held_out[0], position.held_out[-1]
    precision = "full precision" if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    table = Table(title="A small GPT on the standard library's sources", show_header=False, title_justify="left")
    rows = {
        "loss on held-out files, before": f"{before:.3f} nats a byte ({before / math.log(2):.2f} bits)",
        "loss on held-out files, after": f"{after:.3f} nats a byte ({after / math.log(2):.2f} bits)",
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "steps, epoch": f"{position.step:,}, {position.epoch + 1}",
        "trained on": f"{position.tokens / 1e6:.2f} million tokens",
        "speed": f"{position.tokens / max(position.seconds, 1e-9):,.0f} tokens/s",
        "wall time of this run": f"{wall:.1f} s",
        "processes": f"{accelerator.num_processes} on {accelerator.device.type}, {precision}",
        "loss curve": draw(position, args.output_dir / "loss.png") if position.train else "too few steps for one",
        "logs": f"tensorboard --logdir {accelerator.logging_dir}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if args.sample_bytes:
        model.eval()
        generator = torch.Generator().manual_seed(args.seed)
        text = model.generate(b"def ", args.sample_bytes, temperature=0.7, generator=generator)
        shown = "".join(
            char if char.isprintable() or char == "\n" else "·"
            for char in text.decode(errors="replace").replace("\ufffd", "·")
        )
        console.print(Panel(Text(shown), title="what it writes after 'def '", title_align="left"))


# ---------------------------------------------------------------------------------------------------------------- main


def set_aside(folder: Path) -> None:
    """A new run begins in an empty folder; that of a former run is kept under the next free number."""
    if folder.exists() and any(folder.iterdir()):
        number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))
        print(f"the former run in {folder} is now {folder}.{number} (--resume would have gone on with it)")


def steps_bar(accelerator: Accelerator, steps: int) -> progress.Progress:
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("loss {task.fields[loss]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(*columns, disable=not accelerator.is_main_process)
    bar.add_task("training", total=steps, loss="...")
    return bar


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    accelerator = Accelerator(  # [1]
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        log_with="tensorboard",
        project_config=ProjectConfiguration(
            project_dir=str(args.output_dir),
            logging_dir=str(args.output_dir / "logs"),
            automatic_checkpoint_naming=True,
            total_limit=2,
        ),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        exact=True,  # each window counts once an epoch, whatever does not divide
        step_scheduler_with_optimizer=False,  # the schedule counts optimizer steps, whatever the number of processes
    )
    if not args.resume and accelerator.is_main_process:
        set_aside(args.output_dir)
    accelerator.wait_for_everyone()
    set_seed(args.seed)

    model = GPT(args.width, args.layers, args.heads, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.warmup, args.max_steps))
    loader = DataLoader(Windows(standard_library(held_out=False), args.context), args.batch_size, shuffle=True)
    held_out = Windows(standard_library(held_out=True), args.context, args.eval_windows)
    eval_loader = DataLoader(held_out, 4 * args.batch_size)
    model, optimizer, scheduler, loader, eval_loader = accelerator.prepare(  # [2]
        model, optimizer, scheduler, loader, eval_loader
    )

    position = Position()
    accelerator.register_for_checkpointing(position)
    accelerator.init_trackers("train_gpt", config=vars(args))
    if accelerator.resume():  # from here on SIGTERM and SIGUSR1 save first; a run that starts anew has nothing to load
        accelerator.print(f"going on from step {position.step}")
    elif args.resume:
        accelerator.print(f"no checkpoint in {args.output_dir} yet: starting from the beginning")
    if not position.held_out:
        log_held_out(accelerator, position, evaluate(accelerator, model, eval_loader))

    with steps_bar(accelerator, args.max_steps) as bar:

        def show(position: Position) -> None:
            loss = f"{position.train[-1][1]:.3f}" if position.train else "..."
            bar.update(bar.task_ids[0], completed=position.step, loss=loss)

        train(args, accelerator, model, optimizer, scheduler, loader, eval_loader, position, show)

    accelerator.save_model(model, str(args.output_dir / "model"))
    if accelerator.is_main_process:
        report(args, accelerator, accelerator.unwrap_model(model), position, time.perf_counter() - started)
    accelerator.end_training()


if __name__ == "__main__":
    main()
