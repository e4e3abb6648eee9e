# SPDX-License-Identifier: Apache-2.0
"""The data path on several processes whose random numbers differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loaders import BatchesAsItGoes, DrawsAsItGoes, Ids, StreamAsItGoes, drawn, ids, seed
from ranks import run_ranks
from torch.utils.data import DataLoader

from accelerate.data_loader import prepare_data_loader

WORKER = Path(__file__).parent / "workers" / "data_loader.py"


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_on_what_each_of_them_reads(world, tmp_path):
    for result in run_ranks(WORKER, world, tmp_path / "positions.pt", timeout=150):
        assert "all checks passed" in result.stdout
    for name, (seen, positions) in torch.load(tmp_path / "positions.pt", weights_only=False).items():
        for shards in (1, 2, 3):
            rest = []
            for index in range(shards):
                seed(index)
                loader = prepare_data_loader(
                    goes_on(name), num_processes=shards, process_index=index, exact=world == 2
                )
                loader.load_state_dict(positions[index % world])
                for batch in loader:
                    drawn("python", 9)
                    rest += ids(batch)[: loader.batch_counts[index]]
            assert sorted(seen + rest) == list(range(53)), (name, shards)


def goes_on(name):
    source, _, kind = name.partition(", ")
    if kind == "stream":
        return DataLoader(StreamAsItGoes(53, source), batch_size=2)
    if kind == "batches":
        return DataLoader(Ids(53), batch_sampler=BatchesAsItGoes(53, source, 2))
    return DataLoader(Ids(53), batch_size=2, sampler=DrawsAsItGoes(53, source))
