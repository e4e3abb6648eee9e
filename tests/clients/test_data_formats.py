# SPDX-License-Identifier: Apache-2.0
"""Data in the formats of other libraries: webdataset streams, Polars frames, Arrow tables and `datasets`."""

from __future__ import annotations

import io
import json
import tarfile

import pytest
import torch
from rank_pool import on_ranks
from torch.utils.data import DataLoader
from toys import on_cpu

from accelerate import Accelerator, DataLoaderConfiguration

ROWS, BATCH = 24, 4
TABLE = {"x": [float(row) for row in range(ROWS)], "y": [row % 3 for row in range(ROWS)]}


def collate(rows):
    return {key: torch.tensor([row[key] for row in rows]) for key in TABLE}


def trained(loader, accelerator=None):
    """The weight after an epoch of SGD on the mean loss of each global batch, and each row that was read."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        loss = torch.nn.functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"].float())
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(
            batch["x"] if accelerator is None else accelerator.gather_for_metrics(batch["x"])
        )
    return next(model.parameters()).detach(), torch.cat(seen)


def matches_a_plain_loop(data, accelerator, **options):
    """Ranks that split batches of 4 rows do what one process does with whole batches."""
    weight, seen = trained(DataLoader(data, BATCH, collate_fn=collate, **options), accelerator)
    rows = [{key: TABLE[key][row] for key in TABLE} for row in range(ROWS)]
    expected, every = trained(DataLoader(rows, BATCH, collate_fn=collate))
    assert torch.equal(seen, every)
    assert torch.allclose(weight, expected, atol=1e-6)


def splitting(**options):
    return Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, **options)
    )


class Rows(torch.utils.data.Dataset):
    """The rows of a frame or table with `row(number)`."""

    def __init__(self, length, row):
        self.length, self.row = length, row

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        return self.row(number)


@on_ranks(1, 2, env=on_cpu())
def test_polars_frame():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(TABLE)
    matches_a_plain_loop(
        Rows(frame.height, lambda number: frame.row(number, named=True)), splitting()
    )


@on_ranks(1, 2, env=on_cpu())
def test_arrow_table():
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(TABLE)

    def row(number):
        return {name: table[name][number].as_py() for name in TABLE}

    matches_a_plain_loop(Rows(table.num_rows, row), splitting())


@on_ranks(1, 2, env=on_cpu())
@pytest.mark.parametrize("form", ["polars", "arrow", "stream"])
def test_datasets(form):
    datasets = pytest.importorskip("datasets")
    if form == "polars":
        data = datasets.Dataset.from_polars(pytest.importorskip("polars").DataFrame(TABLE))
    else:
        data = datasets.Dataset(pytest.importorskip("pyarrow").table(TABLE))
    # One process reads a stream and sends each rank its part.
    matches_a_plain_loop(
        data.to_iterable_dataset(num_shards=2) if form == "stream" else data, splitting()
    )


@pytest.fixture
def archives(tmp_path):
    """Two tar files of webdataset, with half of the rows each."""
    for archive in range(2):
        with tarfile.open(tmp_path / f"rows-{archive}.tar", "w") as tar:
            for row in range(archive * ROWS // 2, (archive + 1) * ROWS // 2):
                content = json.dumps({key: TABLE[key][row] for key in TABLE}).encode()
                entry = tarfile.TarInfo(f"{row:04}.json")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return tmp_path


def streamed(folder, nodesplitter):
    webdataset = pytest.importorskip("webdataset")
    urls = [str(path) for path in sorted(folder.glob("rows-*.tar"))]
    stream = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=nodesplitter)
    return stream.decode().map(lambda row: row["json"])


@on_ranks(1, 2, env=on_cpu())
@pytest.mark.parametrize("dispatch", [False, True])
def test_webdataset_stream(archives, dispatch):
    """Every rank reads all archives and keeps its rows, or one reads them and sends the others theirs."""
    matches_a_plain_loop(
        streamed(archives, lambda urls: urls), splitting(dispatch_batches=dispatch)
    )


@on_ranks(2, env=on_cpu())
def test_webdataset_stream_that_is_split(archives):
    """`split_by_node` gives each rank one archive, which is not split again."""
    webdataset = pytest.importorskip("webdataset")
    accelerator = Accelerator(cpu=True)
    stream = streamed(archives, webdataset.split_by_node)
    loader = accelerator.prepare(DataLoader(stream, BATCH, collate_fn=collate))
    seen = torch.cat([batch["x"] for batch in loader]).tolist()
    half = ROWS // 2
    assert seen == TABLE["x"][accelerator.process_index * half :][:half]
