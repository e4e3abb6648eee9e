# SPDX-License-Identifier: Apache-2.0
"""A model or function applied to each sample of a dataset, on all processes, into files that survive a kill."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ..checkpointing.commit import FolderInUse, RunLocks
from ..core import json_text
from ..core.errors import ConfigurationError, PrepareError
from ..core.files import atomic_write, user_path
from ..core.imports import is_available
from ..core.messages import warn
from ..core.modules import move_module
from ..core.objects import values_in_words
from ..core.trees import children, map_leaves, send_to_device
from ..runtime.agreement import Agreement, default_connection, first, pauses
from ..state import PartialState
from ..telemetry.display import tqdm

PLAN = "plan.json"
_START = 600.0  # seconds within which every rank must have called `map_dataset`
_VISIBLE = 30.0  # seconds within which a file of one process is visible to the others
# Characters that end a line for `str.splitlines`; JSON allows them in a text.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_calls = itertools.count()  # equal on all ranks: each makes the same calls


def map_dataset(
    function: nn.Module | Callable[[list[Any]], Any],
    dataset: Any,
    output: Any,
    *,
    batch_size: int = 32,
    part_size: int = 1024,
    file_format: str = "jsonl",
    collate: Callable[[list[Any]], Any] | None = None,
    length: Callable[[Any], int] | None = None,
    timeout: float = 3600.0,
) -> list[Path]:
    """Apply a model or a function to each sample of a dataset, and write the results in order, once each.

    The dataset is divided into parts of consecutive samples. Each process takes the next free part, computes it in
    batches, and writes it to a file, which appears when it is complete. If the run is killed, call the function again,
    on any number of processes: it computes the missing parts. Every process must call it.

    Args:
        function: a model or a function. A model is set to evaluation mode, moved to the device of the process, and
            called with the collated batch (by keyword if that is a dictionary, by position if it is a tuple or list).
            A function is called with a list of samples. Both return a row for each sample: a tensor or array whose
            first dimension is the batch, a dictionary of such values, or a list.
        dataset: a dataset with a length and items, or an iterable, which every process reads from the start.
        output: a folder that all processes can reach.
        batch_size: samples in a call.
        part_size: samples in a file. A kill loses at most one part per process.
        file_format: "jsonl" (one line per sample) or "parquet" (needs pyarrow). JSON does not support NaN and
            infinite numbers, which are written as null. Parquet files keep them.
        collate: makes a batch for a model from a list of samples; torch's `default_collate` if None.
        length: returns the length of a sample. Within a part, samples of similar length form a batch. If None, it is
            the length of a text or of its `input_ids`; other samples keep their order.
        timeout: seconds to wait at the end for the other processes.

    Returns:
        The paths of the files, in the order of the samples. A row that is not a dictionary is written as
        `{"output": row}`.

    Raises:
        ConfigurationError: an argument is wrong or differs between ranks, another run writes to the folder, or the
            folder has parts of another size or number of samples.
        PrepareError: the function does not return a row for each sample, or a row cannot be written.

    Example:
        files = map_dataset(model, dataset, "predictions", batch_size=64)
    """
    process = PartialState()
    folder = user_path(output, "map_dataset: output")
    _check_arguments(dataset, batch_size, part_size, file_format)
    count = None
    has_items = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if has_items and not isinstance(dataset, IterableDataset):
        count = len(dataset)
    plan: dict[str, Any] = {
        "part_size": part_size,
        "samples": count,
        "file_format": file_format,
    }
    origin = _origin(function, dataset, count)
    agreement = Agreement(process, "map_dataset")
    locks = RunLocks()
    try:
        done = _open_folder(folder, plan, origin, agreement, process, locks)
        compute = _Compute(
            function, collate or default_collate, length or _length, batch_size, process.device
        )
        queue = _Queue(process.num_processes)
        with _progress(count) as bar:
            if process.is_main_process:
                queue.count(sum(done.values()))
            for number, samples in _take_parts(dataset, plan, done, queue):
                rows: list[Any] = [None] * len(samples)
                for positions, results in compute(samples, number * part_size):
                    for position, row in zip(positions, results, strict=True):
                        rows[position] = row
                    bar.update(queue.count(len(positions)) - bar.n)
                _write_part(folder / _name(number, file_format), rows, number * part_size)
            agreement.exchange(
                "the end",
                None,
                timeout,
                "It may still be computing: increase the timeout of map_dataset.",
            )
            bar.update(queue.count(0) - bar.n)
        numbers: Any = None
        if process.is_main_process:
            numbers = _numbers(folder, file_format)
        numbers = agreement.exchange("files", numbers, _START, reduce=first)
    finally:
        locks.release()
    return [folder / _name(number, file_format) for number in numbers]


# --- the folder ---------------------------------------------------------------------------------------------------


def _check_arguments(dataset: Any, batch_size: int, part_size: int, file_format: str) -> None:
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "map_dataset: dataset is a DataLoader: pass its dataset and batch_size"
        )
    if isinstance(dataset, Mapping):
        raise ConfigurationError(
            f"map_dataset: dataset is a {type(dataset).__name__}: pass one of its datasets"
        )
    if min(batch_size, part_size) < 1:
        raise ConfigurationError(f"map_dataset: {batch_size=} and {part_size=} must be at least 1")
    if file_format not in ("jsonl", "parquet"):
        raise ConfigurationError(
            f"map_dataset: file_format={file_format!r} is neither 'jsonl' nor 'parquet'"
        )
    if file_format == "parquet" and not is_available("pyarrow"):
        raise ConfigurationError(
            "map_dataset: file_format='parquet' needs the package pyarrow: pip install pyarrow"
        )


def _name(number: int, file_format: str) -> str:
    return f"part-{number:05d}.{file_format}"


def _numbers(folder: Path, file_format: str) -> list[int]:
    """Return the numbers of the complete parts in a folder."""
    pattern = re.compile(rf"part-(\d{{5,}})\.{file_format}")
    matches = map(pattern.fullmatch, [path.name for path in folder.iterdir()])
    return sorted(int(match[1]) for match in matches if match)


def _origin(function: Any, dataset: Any, samples: int | None) -> dict[str, int]:
    """Checksums of the first sample and of the first numbers of each of a model's weights."""
    origin = {}
    if samples:
        origin["first sample"] = _checksum(dataset[0])
    if isinstance(function, nn.Module):
        content: list[Any] = [type(function).__qualname__]
        for parameter in function.parameters():
            if not parameter.is_meta and type(parameter) is nn.Parameter:
                content.append(parameter.detach().flatten()[:8])
        origin["model"] = _checksum(content)
    return origin


def _checksum(value: Any) -> int:
    """A checksum of nested data, the same in every process; of other objects only the type is compared."""

    def plain(leaf: Any) -> Any:
        if hasattr(leaf, "tolist"):
            leaf = leaf.tolist()
        if isinstance(leaf, (str, bytes, int, float, list)):
            return leaf
        return type(leaf).__qualname__

    text = repr(map_leaves(plain, value, lambda leaf: children(leaf) is None))
    return zlib.crc32(text.encode())


def _open_folder(
    folder: Path,
    plan: dict[str, Any],
    origin: dict[str, int],
    agreement: Agreement,
    process: PartialState,
    locks: RunLocks,
) -> dict[int, int]:
    """Prepare the folder on rank 0; return {part: its samples} of what a former run has written, on every rank."""
    answer: dict[str, Any] = {"plan": plan}
    if process.is_main_process:
        try:
            answer["done"] = _claim(folder, plan, origin, locks)
        except (ConfigurationError, FolderInUse, OSError) as error:
            answer["error"] = f"map_dataset: {error}"

    def compared(answers: dict[int, Any]) -> dict[str, Any]:
        if any(other["plan"] != plan for other in answers.values()):
            plans = values_in_words({rank: other["plan"] for rank, other in answers.items()})
            return {"error": f"map_dataset: the ranks differ: {plans}", **answers[0]}
        return {"done": [], **answers[0]}

    answer = agreement.exchange("the start", answer, _START, reduce=compared)
    if "error" in answer:
        raise ConfigurationError(answer["error"])
    for waited in pauses():
        if (folder / PLAN).is_file():
            break
        if waited > _VISIBLE:
            raise ConfigurationError(
                f"map_dataset: rank {process.process_index} does not see the files of rank 0 in {folder}: choose a "
                "folder that all processes share"
            )
    size = plan["part_size"]
    parts = dict.fromkeys(answer["done"], size)
    if plan["samples"] is not None:
        for number in parts:
            parts[number] = min(size, plan["samples"] - number * size)
    return parts


def _claim(
    folder: Path, plan: dict[str, Any], origin: dict[str, int], locks: RunLocks
) -> list[int]:
    """Lock the folder for this run and return the parts that it has. Raises ConfigurationError if it is another's.

    A checksum in `origin` that is not that of the run which began the folder is a warning: a sample may be random.
    """
    folder.mkdir(parents=True, exist_ok=True)
    locks.acquire(folder.resolve())
    present = _numbers(folder, "(?:jsonl|parquet)")
    try:
        former = json_text.read(folder / PLAN)
    except FileNotFoundError:
        if present:
            raise ConfigurationError(
                f"{folder} has parts but not {PLAN}: choose another folder"
            ) from None
        with atomic_write(folder / PLAN, "w") as file:
            json.dump({**plan, "origin": origin}, file)
    except json_text.JSONTextError as error:
        raise ConfigurationError(f"{folder / PLAN} cannot be read: {error}") from None
    else:
        former_origin: Any = {}
        if isinstance(former, dict):
            former_origin = former.pop("origin", {})
        if former != plan:
            raise ConfigurationError(
                f"{folder} was written with {former}, but now it is {plan}: choose another folder"
            )
        changed = [what for what in origin if former_origin.get(what, origin[what]) != origin[what]]
        if changed and present:
            warn(
                f"map_dataset: {folder} has {len(present)} complete parts of a run with a "
                f"different {' and '.join(changed)}. They were kept: choose another folder to "
                "compute them again"
            )
    for leftover in folder.glob(".part-*.tmp"):
        leftover.unlink(missing_ok=True)
    return present


def _write_part(path: Path, rows: list[Any], first: int) -> None:
    records = [row if isinstance(row, dict) else {"output": row} for row in rows]
    with atomic_write(path) as file:
        if path.suffix == ".parquet":
            _write_parquet(file, records, first)
            return
        for number, record in enumerate(records, first):
            try:
                line = _json(record).encode()
            except (TypeError, ValueError, RecursionError) as error:
                raise PrepareError(
                    f"map_dataset: the row of sample {number} cannot be written: {error}"
                ) from error
            file.write(line + b"\n")


def _json(record: dict[str, Any]) -> str:
    """One line of JSON, in which NaN and infinite numbers, which JSON does not have, are null."""
    try:
        text = json.dumps(record, default=_plain, ensure_ascii=False, allow_nan=False)
    except ValueError:
        constants: list[str] = []
        # Raises the same error where it was about something else.
        with_null = json.loads(json.dumps(record, default=_plain), parse_constant=constants.append)
        if set(constants) - {"NaN"}:
            warn(
                "map_dataset: infinite numbers are written as null, because JSON does not "
                "support them. file_format='parquet' keeps them",
                every_rank=True,
            )
        text = json.dumps(with_null, ensure_ascii=False)
    return text.translate(_LINE_ENDS)


def _write_parquet(file: IO[bytes], records: list[dict[str, Any]], first: int) -> None:
    import pyarrow
    import pyarrow.parquet

    for record in records:
        for name, value in record.items():
            if hasattr(value, "tolist"):
                record[name] = value.tolist()
    try:
        table = pyarrow.Table.from_pylist(records)
    except (pyarrow.ArrowException, TypeError) as error:
        raise PrepareError(
            f"map_dataset: the rows from sample {first} on cannot be written: {error}"
        ) from error
    pyarrow.parquet.write_table(table, file)


def _plain(value: Any) -> Any:
    """Return a tensor, an array or a scalar of one as plain numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"an object of type {type(value).__name__} is not a number, string, list, dictionary or "
        "tensor"
    )


# --- samples ------------------------------------------------------------------------------------------------------


class _Queue:
    """Numbers of parts, each given to one process, and a count of the samples that all processes have computed."""

    def __init__(self, processes: int) -> None:
        self._name = f"accelerate/map_dataset/{next(_calls)}"
        self._store: Any = None
        if processes > 1:
            self._store = default_connection().store
        # One process counts by itself.
        self._counts: Counter[str] = Counter()

    def _add(self, what: str, number: int) -> int:
        if self._store is not None:
            return int(self._store.add(f"{self._name}/{what}", number))
        self._counts[what] += number
        return self._counts[what]

    def next(self) -> int:
        """Return the number of the next part."""
        return self._add("part", 1) - 1

    def count(self, samples: int) -> int:
        """Add to the number of computed samples; return the sum of all processes."""
        return self._add("samples", samples)


def _take_parts(
    dataset: Any, plan: Mapping[str, Any], done: Mapping[int, int], queue: _Queue
) -> Iterator[tuple[int, list[Any]]]:
    """The parts that this process computes: number and samples."""
    size = plan["part_size"]
    total = plan["samples"]
    stream = None
    position = 0
    if total is None:
        stream = iter(dataset)
    while True:
        number = queue.next()
        begin = number * size
        if stream is None and begin >= total:
            return
        if number in done:
            continue
        if stream is None:
            yield number, [dataset[index] for index in range(begin, min(total, begin + size))]
            continue
        samples = list(itertools.islice(stream, begin - position, begin - position + size))
        position = begin + size
        if not samples:
            return
        yield number, samples


def _length(sample: Any) -> int:
    if isinstance(sample, Mapping):
        sample = sample.get("input_ids")
    elif not isinstance(sample, str):
        return 0
    if sample is None:
        return 0
    return len(sample)


# --- computing ----------------------------------------------------------------------------------------------------


@dataclass
class _Compute:
    """The results of a model or a function for the samples of a part."""

    function: nn.Module | Callable[[list[Any]], Any]
    collate: Callable[[list[Any]], Any]
    length: Callable[[Any], int]
    batch_size: int
    device: torch.device

    def __post_init__(self) -> None:
        if isinstance(self.function, nn.Module):
            self.function.eval()
            if not hasattr(self.function, "hf_device_map"):
                move_module(self.function, self.device)

    @torch.no_grad()
    def _call(self, samples: list[Any]) -> Any:
        if not isinstance(self.function, nn.Module):
            return self.function(samples)
        batch = send_to_device(self.collate(samples), self.device)
        if isinstance(batch, Mapping):
            return self.function(**batch)
        if isinstance(batch, (tuple, list)):
            return self.function(*batch)
        return self.function(batch)

    def __call__(self, samples: list[Any], first: int) -> Iterator[tuple[list[int], list[Any]]]:
        """Yield the positions of a batch in the part, and its rows. The longest samples come first."""
        lengths = [self.length(sample) for sample in samples]
        order = sorted(range(len(samples)), key=lengths.__getitem__, reverse=True)
        for begin in range(0, len(order), self.batch_size):
            positions = order[begin : begin + self.batch_size]
            batch = [samples[position] for position in positions]
            try:
                rows = _rows(self._call(batch), len(positions))
                yield positions, rows
            except Exception as error:
                numbers = [str(first + position) for position in positions[:8]]
                if len(positions) > 8:
                    numbers.append("...")
                error.add_note(f"map_dataset: in the batch of samples {', '.join(numbers)}")
                raise


def _rows(result: Any, count: int, name: str = "") -> list[Any]:
    """The rows of a result, one for each of `count` samples. Tensors are moved to the CPU at once."""
    if isinstance(result, Mapping):
        columns = {}
        for key, value in result.items():
            if value is not None:
                columns[key] = _rows(value, count, f" as {key!r}")
        return [{key: column[row] for key, column in columns.items()} for row in range(count)]
    if isinstance(result, torch.Tensor):
        result = result.detach().cpu()
    returned = f"an object of type {type(result).__name__}"
    if getattr(result, "shape", None):
        result = result.tolist()
    if not isinstance(result, Sequence) or isinstance(result, str):
        raise PrepareError(
            f"map_dataset: the function returned {returned}{name} for {count} samples: return one "
            "row per sample"
        )
    if len(result) != count:
        raise PrepareError(
            f"map_dataset: the function returned {returned} with {len(result)} rows{name} for "
            f"{count} samples: return one row per sample"
        )
    return list(result)


def _progress(samples: int | None) -> Any:
    """A progress bar of the samples of all processes, on the main process."""
    if is_available("tqdm"):
        return tqdm(total=samples, unit=" samples", desc="map_dataset")
    return _NoProgress()


class _NoProgress:
    n = 0

    def __enter__(self) -> _NoProgress:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, samples: int) -> None:
        """Show nothing: tqdm is not installed."""
        self.n += samples
