"""Train a causal language model with transformers, on any number of processes."""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import accelerate
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed


def make_dataset() -> list[dict[str, torch.Tensor]]:
    """Return rows of tokens that count up by a stride. Replace this with your tokenized texts."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(64, (1024, 1), generator=generator)
    stride = torch.randint(1, 5, (1024, 1), generator=generator)
    return [{"input_ids": row} for row in (start + stride * torch.arange(32)) % 64]


def make_model(name: str | None) -> PreTrainedModel:
    """Return the model of this name or folder, or a new small one."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    """Train, save a checkpoint after each epoch, and write the model for `from_pretrained`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("run"), help="folder of the run")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=64, help="samples of all processes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--model", help="name or folder of a model (default: a new small one)")
    args = parser.parse_args()

    accelerator = Accelerator(
        exact=True,  # the same model on any number of processes
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(
            args.output, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(0)
    model = make_model(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(make_dataset(), args.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    report = accelerator.resume()  # None if there is no checkpoint yet
    for epoch in range(report.epoch if report else 0, args.epochs):
        for batch in loader:
            loss = model(**batch, labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")
        accelerator.save_state()
    accelerate.export(model, args.output / "model")
    accelerator.end_training()


if __name__ == "__main__":
    main()
