# SPDX-License-Identifier: Apache-2.0
"""Read back what a run stored, with each package's own reader where it has one for local files."""

from __future__ import annotations

import contextlib
import csv
import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Stored:
    """One run: {name: [(step, value)]}, the configuration, the images as (height, width), the tables as rows."""

    values: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    images: list[tuple[int, int]] = field(default_factory=list)
    tables: list[list[list[Any]]] = field(default_factory=list)

    def add(self, name: str, step: int, value: float) -> None:
        self.values.setdefault(name, []).append((int(step), float(value)))


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.rglob(pattern)
    return path


def size(path: Any) -> tuple[int, int]:
    from PIL import Image

    with Image.open(path) as image:
        return image.size[1], image.size[0]


def tensorboard(folder: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    run = Stored()
    events = EventAccumulator(str(only(folder, "events.out.*").parent))
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            run.add(name, event.step, event.value)
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    for name, value in plugin_data_pb2.HParamsPluginData.FromString(
        content
    ).session_start_info.hparams.items():
        run.config[name] = getattr(value, value.WhichOneof("kind"))
    run.images = [
        (image.height, image.width)
        for name in events.Tags()["images"]
        for image in events.Images(name)
    ]
    return run


def wandb(folder: Path) -> Stored:
    from wandb.proto import wandb_internal_pb2

    run = Stored()
    for data in _leveldb_log(only(folder / "wandb", "run-*.wandb").read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        for item in record.config.update:
            run.config[item.key] = json.loads(item.value_json)
        if record.HasField("history"):
            # Media have keys of several parts.
            items = [
                (item.nested_key or [item.key], item.value_json) for item in record.history.item
            ]
            row = {key[0]: json.loads(value) for key, value in items if len(key) == 1}
            for name, value in row.items():
                if isinstance(value, (int, float)) and not name.startswith("_"):
                    run.add(name, row["_step"], value)
    (files,) = (folder / "wandb").glob("offline-run-*/files")
    run.images = [size(path) for path in files.rglob("*.png")]
    run.tables = [
        [table["columns"], *table["data"]]
        for path in files.rglob("*.table.json")
        for table in [_json(path)]
    ]
    return run


def _leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of W&B's file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<4xHB", data, position)
        if kind == 0:
            position += left
            continue
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield parts
            parts = b""


def mlflow(folder: Path) -> Stored:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("project")
    (found,) = client.search_runs([experiment.experiment_id])
    run = Stored(config=dict(found.data.params))
    for name in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, name):
            run.add(name, metric.step, metric.value)
    for artifact in client.list_artifacts(found.info.run_id):
        path = client.download_artifacts(found.info.run_id, artifact.path, str(folder))
        assert size(path)[0] > 100, "a figure of matplotlib"
        run.images.append((8, 6))
    return run


def trackio(folder: Path) -> Stored:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("project")
    run = Stored(config=SQLiteStorage.get_run_config("project", name))
    for row in SQLiteStorage.get_logs("project", name):
        for key in row.keys() - {"step", "timestamp"}:
            run.add(key, row["step"], row[key])
    return run


def aim(folder: Path) -> Stored:
    from aim import Repo, Run
    from aim.storage.context import Context

    (key,) = Repo(str(folder)).list_all_runs()
    # Not `read_only`: Aim 3.29 shows a new run to readers only after its server has indexed it.
    found = Run(key, repo=str(folder), system_tracking_interval=None, capture_terminal_logs=False)
    run = Stored(config=found["hparams"])
    for metric in found.metrics():
        for row in metric.dataframe().sort_values("step").to_dict("records"):
            run.add(metric.name, row["step"], row["value"])
    pictures = found.get_image_sequence("picture", Context({}))
    for picture in pictures.values.sparse_list()[1] if pictures is not None else []:
        assert picture.caption == "half"
        run.images.append(picture.to_pil_image().size[::-1])
    return run


def comet_ml(folder: Path) -> Stored:
    run = Stored()
    with zipfile.ZipFile(only(folder, "*.zip")) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    for message in messages:
        payload = message["payload"]
        if message["type"] == "parameter_msg":
            parameter = payload.get("param") or payload["params"]
            run.config[parameter["paramName"]] = parameter["paramValue"]
        metric = payload.get("metric")
        if message["type"] == "metric_msg" and metric["metricName"] in (
            "loss",
            "count",
            "flag",
            "tail",
        ):
            run.add(metric["metricName"], metric["step"], metric["metricValue"])
    return run


def clearml(folder: Path) -> Stored:
    run = Stored()
    session = folder / "clearml"
    with zipfile.ZipFile(only(folder, "offline-*.zip")) as archive:
        archive.extractall(session)
    task = _json(session / "task.json")
    run.config["text"] = task["configuration"]["General"]["value"]
    for line in (session / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            if event["type"] == "training_stats_scalar" and not event["metric"].startswith(":"):
                run.add(event["metric"], event["iter"], event["value"])
            elif event["type"] == "plot" and event["metric"] == "answers":
                (plot,) = json.loads(event["plot_str"])["data"]
                columns = [
                    text.replace("<b>", "").replace("</b>", "") for text in plot["header"]["values"]
                ]
                run.tables.append([columns, *map(list, zip(*plot["cells"]["values"], strict=True))])
    run.images = [size(path) for path in session.rglob("*.jpeg")]
    return run


def dvclive(folder: Path) -> Stored:
    import yaml

    run = Stored(config=yaml.safe_load((folder / "live" / "params.yaml").read_text()))
    for path in (folder / "live" / "plots" / "metrics").glob("*.tsv"):
        with open(path) as file:
            for row in csv.DictReader(file, delimiter="\t"):
                text = row[path.stem]
                run.add(path.stem, int(row["step"]), {"True": 1.0}.get(text) or float(text))
    return run


def swanlab(folder: Path) -> Stored:
    import sqlite3

    import yaml

    (home,) = folder.glob("run-*")
    config = yaml.safe_load((home / "files" / "config.yaml").read_text())
    run = Stored(config={name: entry["value"] for name, entry in config.items()})
    with contextlib.closing(sqlite3.connect(folder / "runs.swanlab")) as dashboard:
        tags = dashboard.execute("select name, folder from tag where type = 'line'").fetchall()
    for name, number in tags:
        for line in (home / "logs" / number / "1000.log").read_text().splitlines():
            point = json.loads(line)
            run.add(name, point["index"], point["data"])
    run.images = [size(path) for path in home.rglob("*.png")]
    return run


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


READERS: dict[str, Callable[[Path], Stored]] = {
    reader.__name__: reader
    for reader in (tensorboard, wandb, mlflow, trackio, aim, comet_ml, clearml, dvclive, swanlab)
}
