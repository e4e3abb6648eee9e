"""Train a diffusion model with diffusers, on any number of processes."""

import argparse
from pathlib import Path

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

SIZE = 16  # pixels


def make_dataset() -> Dataset:
    """Return images of a square, from -1 to 1. Replace this with your images."""
    images = -torch.ones(512, 1, SIZE, SIZE)
    corners = torch.randint(SIZE - 6, (512, 2), generator=torch.Generator().manual_seed(0))
    for image, (row, column) in zip(images, corners.tolist(), strict=True):
        image[0, row : row + 6, column : column + 6] = 1
    return TensorDataset(images)


def make_model() -> UNet2DModel:
    """Return the model that predicts the noise of an image."""
    return UNet2DModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def main() -> None:
    """Train, save a checkpoint after each epoch, and write the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("run"), help="folder of the run")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=64, help="samples of all processes")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    accelerator = Accelerator(
        exact=True,  # the same model on any number of processes
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(
            args.output, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(0)
    model = make_model()
    noise_scheduler = DDPMScheduler(num_train_timesteps=200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(make_dataset(), args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    report = accelerator.resume()  # None if there is no checkpoint yet
    for epoch in range(report.epoch if report else 0, args.epochs):
        random = torch.Generator().manual_seed(epoch)
        for (images,) in loader:
            # Each process draws the noise of all samples of the batch, and takes that of its own.
            noise = torch.randn(args.batch_size, 1, SIZE, SIZE, generator=random)
            times = torch.randint(200, (args.batch_size,), generator=random)
            with accelerator.split_between_processes({"noise": noise, "times": times}) as part:
                noise = part["noise"].to(accelerator.device)
                times = part["times"].to(accelerator.device)
            predicted = model(noise_scheduler.add_noise(images, noise, times), times).sample
            loss = torch.nn.functional.mse_loss(predicted.float(), noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")
        accelerator.save_state()
    if accelerator.is_main_process:
        pipeline = DDPMPipeline(accelerator.unwrap_model(model), noise_scheduler)
        pipeline.save_pretrained(args.output / "pipeline")
    accelerator.end_training()


if __name__ == "__main__":
    main()
