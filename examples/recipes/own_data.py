# SPDX-License-Identifier: Apache-2.0
"""Train on your own files, Parquet or webdataset: each sample once an epoch, on any number of processes, and resume.

    python examples/recipes/own_data.py --format parquet
    accelerate launch --num_processes 2 examples/recipes/own_data.py --format webdataset --stop_after 23
    accelerate launch --num_processes 2 examples/recipes/own_data.py --format webdataset

The files with 1,003 samples are written first. The second command stops in the first epoch, after the checkpoint of
step 20, and the third continues there. At the end of each epoch, the samples that were read are counted, also those
before the stop.
"""

import argparse
import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

SAMPLES, FILES, EPOCHS, SAVE_EVERY = 1003, 4, 2, 20


def rows(file: int) -> range:
    """Return the samples of a file; their numbers differ."""
    return range(SAMPLES * file // FILES, SAMPLES * (file + 1) // FILES)


def sample(number: int) -> dict:
    """Return one sample: its number, what the model reads, and the class it is to find."""
    x = np.random.default_rng(number).standard_normal(8, dtype=np.float32)
    return {"number": number, "x": x.tolist(), "label": int(x[:4].argmax())}


def write_parquet(folder: Path) -> None:
    """Write the samples as Parquet files."""
    import pyarrow
    from pyarrow import parquet

    for file in range(FILES):
        parquet.write_table(
            pyarrow.Table.from_pylist([*map(sample, rows(file))]), folder / f"{file}.parquet"
        )


def write_webdataset(folder: Path) -> None:
    """Write the samples as tar files. Files of a sample have the same name up to the first dot."""
    for file in range(FILES):
        with tarfile.open(folder / f"{file}.tar", "w") as archive:
            for number in rows(file):
                content = json.dumps(sample(number)).encode()
                entry = tarfile.TarInfo(f"{number:06d}.json")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
    """Return a batch."""
    return {name: torch.tensor([one[name] for one in samples]) for name in ("number", "x", "label")}


def parquet_loader(folder: Path, batch_size: int, workers: int) -> DataLoader:
    """Read Parquet in any order: `datasets` converts the files once, and then maps them into memory."""
    import datasets

    files = sorted(map(str, folder.glob("*.parquet")))
    data = datasets.Dataset.from_parquet(files, cache_dir=str(folder / "cache"))
    return DataLoader(data, batch_size, shuffle=True, collate_fn=collate, num_workers=workers)


def webdataset_loader(folder: Path, batch_size: int, workers: int) -> DataLoader:
    """Read tar files from front to back: each process reads its own files, and of those each worker."""
    import webdataset

    files = sorted(map(str, folder.glob("*.tar")))
    # `prepare` does not split the stream again. webdataset itself splits the files of a process over its workers.
    data = webdataset.WebDataset(files, nodesplitter=webdataset.split_by_node, shardshuffle=False)
    data = data.decode().map(lambda content: content["json"])
    return DataLoader(data, batch_size, collate_fn=collate, num_workers=workers)


FORMATS = {
    "parquet": (write_parquet, parquet_loader),
    "webdataset": (write_webdataset, webdataset_loader),
}


class Progress:
    """What the loop itself remembers, the same on all processes. It is registered, so checkpoints contain it."""

    def __init__(self) -> None:
        self.step, self.numbers = 0, []  # optimizer steps, and the samples of this epoch

    def state_dict(self) -> dict:
        return {"step": self.step, "numbers": self.numbers}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.numbers = state["step"], state["numbers"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/own_data"), help="default: %(default)s"
    )
    parser.add_argument(
        "--batch_size", type=int, default=16, help="samples of a process (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="of each process (default: %(default)s)"
    )
    parser.add_argument(
        "--stop_after", type=int, help="end after this many steps, as a killed run would"
    )
    args = parser.parse_args()
    output = args.output / args.format
    project = ProjectConfiguration(str(output), automatic_checkpoint_naming=True, total_limit=2)
    # With dispatch_batches=True, which is the default for streams on a GPU, one process would read for all.
    accelerator = Accelerator(
        project_config=project,
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches=False, use_seedable_sampler=True, data_seed=0
        ),
    )
    set_seed(0)
    write, make_loader = FORMATS[args.format]
    folder = output / "data"
    with accelerator.main_process_first():
        if not folder.exists():
            folder.mkdir(parents=True)
            write(folder)
        loader = make_loader(folder, args.batch_size, args.workers)
    model = torch.nn.Linear(8, 4)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), loader
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    report = accelerator.resume()  # None if there is no checkpoint yet
    accelerator.print(
        f"resumed at step {report.step} of epoch {report.epoch}" if report else "started"
    )
    for epoch in range(report.epoch if report else 0, EPOCHS):
        for batch in loader:  # of the resumed epoch: the batches that are left
            loss = F.cross_entropy(model(batch["x"]), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            progress.numbers += accelerator.gather_for_metrics(batch["number"]).tolist()
            if progress.step % SAVE_EVERY == 0:
                accelerator.save_state()
            if progress.step == args.stop_after:
                accelerator.print(f"stopped after step {progress.step}")
                accelerator.end_training()
                return
        times = Counter(Counter(progress.numbers).values())
        read = ", ".join(
            f"{count} samples read {'once' if n == 1 else f'{n} times'}"
            for n, count in times.items()
        )
        accelerator.print(f"epoch {epoch}: {read}; loss {loss.item():.3f}")
        progress.numbers = []
    accelerator.end_training()


if __name__ == "__main__":
    main()
