# SPDX-License-Identifier: Apache-2.0
"""Train a GAN: two models and two optimizers in one loop.

python examples/recipes/gan.py
accelerate launch --num_processes 2 examples/recipes/gan.py        # the same losses
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

NOISE, BATCH = 16, 64  # the size of the global batch


def generator_network() -> nn.Module:
    """Map (batch, NOISE) vectors to (batch, 1, 8, 8) images."""
    return nn.Sequential(
        nn.Linear(NOISE, 128),
        nn.ReLU(),
        nn.Unflatten(1, (32, 2, 2)),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )


def discriminator_network() -> nn.Module:
    """Map (batch, 1, 8, 8) images to (batch, 1) logits: large for real images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--dtype",
        default="float32",
        help="float64 shows the losses of any number of processes alike",
    )
    arguments = parser.parse_args()
    torch.set_default_dtype(getattr(torch, arguments.dtype))
    accelerator = Accelerator(
        exact=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    set_seed(0)
    images = (
        torch.tensor(load_digits(return_X_y=True)[0], dtype=torch.get_default_dtype()).view(
            -1, 1, 8, 8
        )
        / 16
    )
    loader = DataLoader(TensorDataset(images), batch_size=BATCH, shuffle=True, drop_last=True)
    generator, discriminator = generator_network(), discriminator_network()
    generator_optimizer = torch.optim.Adam(
        generator.parameters(), lr=arguments.lr, betas=(0.5, 0.999)
    )
    discriminator_optimizer = torch.optim.Adam(
        discriminator.parameters(), lr=arguments.lr, betas=(0.5, 0.999)
    )
    generator, discriminator, generator_optimizer, discriminator_optimizer, loader = (
        accelerator.prepare(
            generator, discriminator, generator_optimizer, discriminator_optimizer, loader
        )
    )

    random = torch.Generator().manual_seed(1)
    for epoch in range(arguments.epochs):
        sums = torch.zeros(3, device=accelerator.device)
        for (real,) in loader:
            # Noise for the global batch, of which each process takes its part.
            with accelerator.split_between_processes(
                torch.randn(BATCH, NOISE, generator=random)
            ) as part:
                noise = part.to(accelerator.device)

            # 1. The discriminator learns to tell real images from generated ones: two forwards, then one backward.
            with torch.no_grad():
                fake = generator(noise)
            on_real, on_fake = discriminator(real), discriminator(fake)
            discriminator_loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
            accelerator.backward(discriminator_loss)
            discriminator_optimizer.step()
            discriminator_optimizer.zero_grad()

            # 2. The generator learns to deceive it. The discriminator's gradients of this loss are thrown away, so the
            # processes do not exchange them.
            with accelerator.no_sync(discriminator):
                generator_loss = F.softplus(-discriminator(generator(noise))).mean()
                accelerator.backward(generator_loss)
            generator_optimizer.step()
            generator_optimizer.zero_grad()
            discriminator_optimizer.zero_grad()
            sums += torch.stack(
                [
                    discriminator_loss.detach(),
                    generator_loss.detach(),
                    torch.ones_like(generator_loss),
                ]
            )
        of_discriminator, of_generator, batches = accelerator.reduce(sums).tolist()
        accelerator.print(
            f"epoch {epoch}: loss of the discriminator {of_discriminator / batches:.4f}, "
            f"of the generator {of_generator / batches:.4f}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
