# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level GPT on the Python sources of the standard library.

    python examples/train_gpt.py                                        one process
    accelerate launch --num_processes 2 examples/train_gpt.py           two processes: 1-2 minutes on two cores
    torchrun --nproc_per_node 2 examples/train_gpt.py                   two processes, started by torchrun
    accelerate launch --num_processes 2 examples/train_gpt.py --resume  resume from the newest checkpoint

The lines marked [1] to [5] are the Accelerate calls for any device and any number of processes. The rest is plain
PyTorch. Checkpoints, TensorBoard logs, the loss curve and the trained weights go to `runs/gpt`.
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

BYTES = 256  # vocabulary size: each byte is a token

# ----------------------------------------------------------------------------------------------------------- arguments


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__[__doc__.index("\n\n") + 2 :],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--output_dir", type=Path, default=Path("runs/gpt"), help="folder for all output (default: %(default)s)"
    )
    run.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --output_dir")
    run.add_argument(
        "--save_every", type=positive_int, default=250, help="steps between checkpoints (default: %(default)s)"
    )
    run.add_argument(
        "--eval_every", type=positive_int, default=100, help="steps between evaluations (default: %(default)s)"
    )
    run.add_argument(
        "--log_every", type=positive_int, default=10, help="steps between log entries (default: %(default)s)"
    )
    run.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and the data order (default: %(default)s)"
    )
    run.add_argument("--cpu", action="store_true", help="use the CPU even if an accelerator is available")
    optim = parser.add_argument_group("optimization")
    optim.add_argument("--max_steps", type=positive_int, default=1000, help="optimizer steps (default: %(default)s)")
    optim.add_argument(
        "--batch_size", type=positive_int, default=4, help="batch size per process (default: %(default)s)"
    )
    optim.add_argument(
        "--accumulate", type=positive_int, default=2, help="gradient accumulation steps (default: %(default)s)"
    )
    optim.add_argument("--lr", type=float, default=6e-3, help="peak learning rate (default: %(default)s)")
    optim.add_argument("--warmup", type=positive_int, default=30, help="warmup steps (default: %(default)s)")
    optim.add_argument("--clip", type=float, default=1.0, help="maximum gradient norm (default: %(default)s)")
    optim.add_argument(
        "--mixed_precision", choices=["no", "bf16", "fp16"], help="default: the setting of the launcher, else no"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=positive_int, default=3, help="(default: %(default)s)")
    model.add_argument("--width", type=positive_int, default=96, help="(default: %(default)s)")
    model.add_argument("--heads", type=positive_int, default=4, help="(default: %(default)s)")
    model.add_argument(
        "--context", type=positive_int, default=128, help="context length, bytes (default: %(default)s)"
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--eval_windows", type=positive_int, default=256, help="number of held-out windows (default: %(default)s)"
    )
    data.add_argument(
        "--sample_bytes", type=int, default=400, help="bytes to generate after training (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.width % arguments.heads:
        parser.error(f"--width {arguments.width} is not divisible by --heads {arguments.heads}")
    if not (arguments.lr > 0 and arguments.clip > 0):
        parser.error("--lr and --clip must be positive")
    return arguments


def positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


# ---------------------------------------------------------------------------------------------------------------- data


def standard_library(held_out: bool) -> torch.Tensor:
    """Return the source files as one uint8 tensor: about 90% of the files, or the held-out 10%.

    A hash of the file name decides, so the split is the same on every run.
    """
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings", "pydoc_data"}
    sources = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not excluded.intersection(name.parts) and (zlib.crc32(name.as_posix().encode()) % 10 == 0) == held_out:
            sources.append(path.read_bytes())
    if not sources:
        raise SystemExit(f"no Python sources of the standard library in {root}: is it installed as a zip archive?")
    return torch.frombuffer(bytearray(b"\n\n".join(sources)), dtype=torch.uint8)


class Windows(Dataset):
    """Consecutive windows of `context` bytes. The target is the same window shifted by one byte."""

    def __init__(self, data: torch.Tensor, context: int, count: int | None = None) -> None:
        total = (len(data) - 1) // context
        if not total:
            raise SystemExit(f"--context {context} is longer than the text ({len(data)} bytes)")
        self.data, self.context = data, context
        # All windows, or `count` windows that are evenly spaced over the text.
        self.starts = (
            [i * total // count * context for i in range(count)] if count else range(0, total * context, context)
        )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.data[self.starts[index] : self.starts[index] + self.context + 1].long()
        return window[:-1], window[1:]


# --------------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then an MLP, each with a residual connection."""

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
    """Map (batch, time) bytes to (batch, time, 256) logits of the next byte."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embed, self.position = nn.Embedding(BYTES, width), nn.Embedding(context, width)
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

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float, generator: torch.Generator) -> bytes:
        tokens = torch.tensor([list(prompt)], device=self.embed.weight.device)
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[0, -1].float().cpu()
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, token[None].to(tokens.device)], dim=1)
        return bytes(tokens[0].tolist())


def loss_of(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the cross entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


# ------------------------------------------------------------------------------------------------------------ training


@dataclass
class TrainState:
    """Progress and history of the run. It is saved in every checkpoint."""

    step: int = 0
    epoch: int = 0
    samples: int = 0  # in this epoch, over all processes
    tokens: int = 0  # over all processes
    seconds: float = 0.0  # training time without evaluations and checkpoints
    train: list[list[float]] = field(default_factory=list)  # [step, loss] pairs
    held_out: list[list[float]] = field(default_factory=list)

    def state_dict(self) -> dict:
        return asdict(self)

    def load_state_dict(self, values: dict) -> None:
        self.__dict__.update(values)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the mean loss over the held-out windows. Each window counts once, on any number of processes."""
    model.eval()
    losses = []
    for inputs, targets in loader:
        loss = loss_of(model(inputs), targets, reduction="none").view(targets.shape).mean(dim=1)
        losses.append(accelerator.gather_for_metrics(loss))  # [5]
    model.train()
    return torch.cat(losses).mean().item()


def rate(step: int, warmup: int, steps: int) -> float:
    """Return the learning rate factor: linear warmup, then cosine decay to 5%."""
    if step < warmup:
        return (step + 1) / warmup
    fraction = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))


def train(args, accelerator, model, optimizer, scheduler, loader, eval_loader, state: TrainState, show) -> None:
    """Train up to --max_steps. Log, evaluate and save at the intervals of the arguments."""
    global_batch = args.batch_size * accelerator.num_processes
    loss_sum, batches = torch.zeros((), device=accelerator.device), 0
    clock = time.perf_counter()
    while state.step < args.max_steps:
        loader.set_epoch(state.epoch)  # the seed and the epoch determine the data order
        for inputs, targets in accelerator.skip_first_batches(loader, state.samples // global_batch):
            with accelerator.accumulate(model):  # [3]
                loss = loss_of(model(inputs), targets)
                accelerator.backward(loss)  # [4]
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                optimizer.zero_grad()
            state.samples += global_batch
            state.tokens += global_batch * args.context
            loss_sum, batches = loss_sum + loss.detach(), batches + 1
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            state.step += 1
            if state.step % args.log_every == 0:
                mean = accelerator.reduce(loss_sum / batches, reduction="mean").item()
                loss_sum, batches = torch.zeros_like(loss_sum), 0
                state.train.append([state.step, mean])
                accelerator.log({"loss/train": mean, "lr": scheduler.get_last_lr()[0]}, step=state.step)
            show(state)
            last = state.step == args.max_steps
            if last or state.step % args.eval_every == 0 or state.step % args.save_every == 0:
                state.seconds += time.perf_counter() - clock
                if last or state.step % args.eval_every == 0:
                    log_held_out(accelerator, state, evaluate(accelerator, model, eval_loader))
                if last or state.step % args.save_every == 0:
                    accelerator.save_state()
                clock = time.perf_counter()
            if last:
                return
        state.epoch, state.samples = state.epoch + 1, 0


def log_held_out(accelerator: Accelerator, state: TrainState, loss: float) -> None:
    state.held_out.append([state.step, loss])
    accelerator.log({"loss/held_out": loss}, step=state.step)
    accelerator.print(f"step {state.step:5d}   loss on held-out files {loss:.4f} nats/byte")


# -------------------------------------------------------------------------------------------------------------- report


def draw(state: TrainState, path: Path) -> str:
    """Plot the loss curve. Return the path of the image, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "needs matplotlib: pip install matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes.plot(*zip(*state.train, strict=True), color="#8ab4d8", linewidth=1.5, label="training")
    axes.plot(*zip(*state.held_out, strict=True), color="#c0392b", marker="o", markersize=4, label="held-out files")
    axes.axhline(math.log(BYTES), color="#999999", linestyle=":", label="uniform guess, ln 256")
    axes.set(xlabel="optimizer step", ylabel="loss (nats/byte)", title="A small GPT on the standard library")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
    return str(path)


def report(args, accelerator, model: GPT, state: TrainState, wall: float) -> None:
    """Print a summary and a sample, and plot the loss curve."""
    (_, before), (_, after) = state.held_out[0], state.held_out[-1]
    precision = "full precision" if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    table = Table(title="A small GPT on the standard library", show_header=False, title_justify="left")
    rows = {
        "held-out loss before training": f"{before:.3f} nats/byte ({before / math.log(2):.2f} bits)",
        "held-out loss after training": f"{after:.3f} nats/byte ({after / math.log(2):.2f} bits)",
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "steps": f"{state.step:,} (epoch {state.epoch + 1})",
        "training data": f"{state.tokens / 1e6:.2f} million tokens",
        "speed": f"{state.tokens / max(state.seconds, 1e-9):,.0f} tokens/s",
        "wall time of this run": f"{wall:.1f} s",
        "processes": f"{accelerator.num_processes} on {accelerator.device.type}, {precision}",
        "loss curve": draw(state, args.output_dir / "loss.png") if state.train else "none: no loss was logged",
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
        console.print(Panel(Text(shown), title="sample for the prompt 'def '", title_align="left"))


# ---------------------------------------------------------------------------------------------------------------- main


def set_aside(folder: Path) -> None:
    """Rename the folder of a previous run to the next free number."""
    if folder.exists() and any(folder.iterdir()):
        number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))
        print(f"moved the previous run from {folder} to {folder}.{number} (pass --resume to continue a run)")


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
    start = time.perf_counter()
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
        exact=True,  # each window counts once per epoch, even if the last batch is short
        step_scheduler_with_optimizer=False,  # the scheduler counts optimizer steps, not batches of all processes
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

    state = TrainState()
    accelerator.register_for_checkpointing(state)
    accelerator.init_trackers("train_gpt", config=vars(args))
    if accelerator.resume():  # also saves a checkpoint on SIGTERM and SIGUSR1 from here on
        accelerator.print(f"resuming from step {state.step}")
    elif args.resume:
        accelerator.print(f"no checkpoint in {args.output_dir}: starting from step 0")
    if not state.held_out:
        log_held_out(accelerator, state, evaluate(accelerator, model, eval_loader))

    with steps_bar(accelerator, args.max_steps) as bar:

        def show(state: TrainState) -> None:
            loss = f"{state.train[-1][1]:.3f}" if state.train else "..."
            bar.update(bar.task_ids[0], completed=state.step, loss=loss)

        train(args, accelerator, model, optimizer, scheduler, loader, eval_loader, state, show)

    accelerator.save_model(model, str(args.output_dir / "model"))
    if accelerator.is_main_process:
        report(args, accelerator, accelerator.unwrap_model(model), state, time.perf_counter() - start)
    accelerator.end_training()


if __name__ == "__main__":
    main()
