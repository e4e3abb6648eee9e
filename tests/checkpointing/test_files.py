# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of ours beside the format's own library, and the block writer under them."""

from __future__ import annotations

import os

import pytest
import safetensors.torch
import torch

from accelerate.checkpointing import files
from accelerate.checkpointing.files import (
    BlockIO,
    read_into,
    read_tensors,
    segments,
    without_aliases,
)
from accelerate.core.errors import CheckpointError
from accelerate.core.tensor_files import CorruptFile, read_header


def mixed() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "half": torch.rand(3, 5).to(torch.float16),
        "wide": torch.rand(7, 300, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "strided": torch.rand(40, 30).t(),
        "brain": torch.rand(11).to(torch.bfloat16),
        "small": torch.rand(9).to(torch.float8_e4m3fn),
        "whole": torch.arange(5),
    }


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8),
        other.contiguous().reshape(-1).view(torch.uint8),
    )


@pytest.fixture
def small_blocks(monkeypatch):
    # Blocks that end inside tensors and inside elements, and calls of few pieces.
    monkeypatch.setattr(files, "BLOCK", 1000)
    monkeypatch.setattr(files, "_IOV_MAX", 3)


@pytest.mark.usefixtures("small_blocks")
def test_both_libraries_read_both(tmp_path):
    tensors = mixed()
    with BlockIO() as io:
        record = io.write(tmp_path / "ours", segments(tensors, {"note": "x"}))
        assert record.size == (tmp_path / "ours").stat().st_size and len(record.crc32) == -(
            -record.size // 1000
        )
        theirs = safetensors.torch.load_file(tmp_path / "ours")
        safetensors.torch.save_file(
            {name: t.contiguous() for name, t in tensors.items()}, tmp_path / "theirs"
        )
        ours = read_tensors(io, tmp_path / "ours", record)
        foreign = read_tensors(io, tmp_path / "theirs")
        io.check(tmp_path / "ours", record)
        assert io.record(tmp_path / "ours") == record
    for found in (theirs, ours, foreign):
        assert set(found) == set(tensors) and all(
            equal(found[name], tensors[name]) for name in tensors
        )
    assert read_header(tmp_path / "ours").metadata == {"format": "pt", "note": "x"}


@pytest.mark.usefixtures("small_blocks")
def test_reading_into_tensors_that_exist(tmp_path):
    tensors = mixed()
    with BlockIO() as io:
        io.write(tmp_path / "f", segments(tensors))
        same = {name: torch.empty_like(t).contiguous() for name, t in tensors.items()}
        places = {name: t.data_ptr() for name, t in same.items()}
        read_into(io, tmp_path / "f", same)
        assert all(
            equal(same[name], tensors[name]) and same[name].data_ptr() == places[name]
            for name in tensors
        )
        other = {"strided": torch.empty(40, 30).t(), "half": torch.empty(3, 5, dtype=torch.float64)}
        read_into(io, tmp_path / "f", other)
    assert torch.equal(other["strided"], tensors["strided"])
    assert torch.equal(other["half"], tensors["half"].double())


def test_tied_tensors_are_stored_once(tmp_path):
    weight = torch.rand(50, 50)
    state = {"a": weight, "b": weight, "c": weight.view(50, 50), "half": weight[:25]}
    kept, aliases = without_aliases(state)
    assert set(kept) == {"a", "half"} and aliases == {"b": "a", "c": "a"}
    with BlockIO() as io:
        io.write(tmp_path / "f", segments(kept, aliases))
    assert read_header(tmp_path / "f").aliases == aliases


def test_every_kind_of_damage_is_found(tmp_path):
    path = tmp_path / "f"
    with BlockIO() as io:
        record = io.write(path, segments(mixed()))
        content = path.read_bytes()
        for at in (0, 9, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            with pytest.raises(CorruptFile, match="checksum"):
                io.check(path, record)
            with pytest.raises(CorruptFile):
                read_tensors(io, path, record)
        for cut in (content[:-1], content[:5], b"", content + b"x"):
            path.write_bytes(cut)
            with pytest.raises(CorruptFile):
                io.check(path, record)
            with pytest.raises(CorruptFile):
                read_tensors(io, path)


def test_hostile_headers_are_refused(tmp_path):
    path = tmp_path / "f"
    for header in (
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        b'{"a":{"dtype":"XX","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
        b"[]",
        b"\xff\xfe",
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
        with pytest.raises(CorruptFile):
            read_header(path)


def test_what_has_no_place_in_the_format(tmp_path):
    with pytest.raises(CheckpointError, match=r"^w: .*complex128"):
        segments({"w": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"^w: .*meta"):
        segments({"w": torch.zeros(2, device="meta")})


@pytest.mark.usefixtures("small_blocks")
def test_a_system_that_writes_and_reads_less_than_asked(tmp_path, monkeypatch):
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: write(fd, [parts[0][:7]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read(fd, [parts[0][:5]], at))
    tensors = mixed()
    with BlockIO() as io:
        record = io.write(tmp_path / "f", segments(tensors))
        found = read_tensors(io, tmp_path / "f", record)
    assert all(equal(found[name], tensors[name]) for name in tensors)
