# SPDX-License-Identifier: Apache-2.0
"""Train a small diffusion model with diffusers, and write images.

pip install diffusers scikit-learn
python examples/recipes/diffusion.py --output runs/diffusion
accelerate launch --num_processes 2 examples/recipes/diffusion.py        # the same losses
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

BATCH = 32  # the size of the global batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"])
    parser.add_argument("--output", type=Path, help="folder for the pipeline and for images")
    arguments = parser.parse_args()
    accelerator = Accelerator(
        mixed_precision=arguments.mixed_precision,
        exact=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(0)
    images = (
        torch.tensor(load_digits(return_X_y=True)[0], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    )
    loader = DataLoader(TensorDataset(images), batch_size=BATCH, shuffle=True, drop_last=True)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    steps = arguments.epochs * len(loader)
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=10, num_training_steps=steps
    )
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    random = torch.Generator().manual_seed(1)
    for epoch in range(arguments.epochs):
        losses = []
        for (clean,) in loader:
            # Noise for the global batch, of which each process takes its part.
            drawn = (
                torch.randn(BATCH, 1, 8, 8, generator=random),
                torch.randint(0, 200, (BATCH,), generator=random),
            )
            with accelerator.split_between_processes(list(zip(*drawn, strict=True))) as part:
                noise, times = (
                    torch.stack(values).to(accelerator.device) for values in zip(*part, strict=True)
                )
            predicted = model(noise_scheduler.add_noise(clean, noise, times), times).sample
            loss = F.mse_loss(predicted.float(), noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")

    if arguments.output and accelerator.is_main_process:
        pipeline = DDPMPipeline(unet=accelerator.unwrap_model(model), scheduler=noise_scheduler)
        pipeline.save_pretrained(arguments.output)
        pipeline.set_progress_bar_config(disable=True)
        for number, image in enumerate(pipeline(batch_size=4, num_inference_steps=50).images):
            image.resize((64, 64)).save(arguments.output / f"{number}.png")
    accelerator.end_training()


if __name__ == "__main__":
    main()
