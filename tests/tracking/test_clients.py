# SPDX-License-Identifier: Apache-2.0
"""The calls each tracker makes on its client, recorded by a client that stands in for the real package."""

import logging
import sys
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch

from accelerate.core.errors import ConfigurationError
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

CONFIG = {"lr": torch.tensor(0.5), "name": "x", "nested": {"depth": np.int64(2)}}
PLAIN = {"lr": 0.5, "name": "x", "nested": {"depth": 2}}
VALUES = {
    "loss": torch.tensor(1.5),
    "n": np.int64(3),
    "nested": {"a": 1},
    "text": "hello",
    "none": None,
}


@pytest.fixture
def client(monkeypatch):
    """A function that puts a recording package of this name in the place of the real one."""

    def put(name, *modules):
        package = MagicMock(name=name)
        monkeypatch.setitem(sys.modules, name, package)
        for module in modules:
            found = package
            for part in module.split("."):
                found = getattr(found, part)
            monkeypatch.setitem(sys.modules, f"{name}.{module}", found)
        return package

    return put


def recorded(which, *args, **kwargs):
    tracker = LOGGER_TYPE_TO_CLASS[which](*args, **kwargs)
    tracker.start()
    tracker.start()  # a second start opens no second run
    return tracker


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_clients_with_a_run_object(client, name):
    package = client(name)
    run = package.init.return_value
    tracker = recorded(name, "project", entity="me")
    tracker.store_init_configuration(CONFIG)
    tracker.log(VALUES, step=7, commit=True)
    assert tracker.tracker is tracker.run is run
    tracker.finish()
    tracker.finish()
    options = {"allow_val_change": True} if name == "wandb" else {}
    plain = {"loss": 1.5, "n": 3, "nested": {"a": 1}, "text": "hello", "none": None}
    assert package.mock_calls == [
        call.init(project="project", entity="me"),
        call.init().config.update(PLAIN, **options),
        call.init().log(plain, step=7, commit=True),
        call.init().finish(),
    ]
    assert type(run.log.call_args.args[0]["loss"]) is float


def test_comet(client, caplog):
    package = client("comet_ml")
    tracker = recorded("comet_ml", "project", workspace="w")
    tracker.store_init_configuration(CONFIG)
    with caplog.at_level(logging.WARNING, "accelerate.tracking"):
        tracker.log(VALUES, step=7)
    tracker.log({"loss": 1.0})
    assert tracker.writer is package.start.return_value
    tracker.finish()
    assert package.mock_calls == [
        call.start(project_name="project", workspace="w"),
        call.start().log_parameters(PLAIN),
        call.start().set_step(7),
        call.start().log_metric("loss", 1.5, step=7),
        call.start().log_metric("n", 3, step=7),
        call.start().log_metrics({"a": 1}, step=7),
        call.start().log_other("text", "hello"),
        call.start().log_metric("loss", 1.0, step=None),
        call.start().end(),
    ]
    assert ["'none'" in record.getMessage() for record in caplog.records] == [True]


def test_aim(client):
    package = client("aim")
    run = package.Run.return_value = MagicMock()
    tracker = recorded("aim", "name", logging_dir="repo", log_system_params=True)
    package.Run.assert_called_once_with(repo="repo", log_system_params=True)
    assert (tracker.writer, run.name) == (run, "name")
    tracker.store_init_configuration(CONFIG)
    run.__setitem__.assert_called_once_with("hparams", PLAIN)
    tracker.log({"loss": torch.tensor(1.5)}, step=7, context={"subset": "train"})
    tracker.log_images({"a": "image", "b": ("image", "caption")}, step=1)
    options = {"aim_image": {"format": "png"}, "track": {"context": {"k": 1}}}
    tracker.log_images({"c": ("image", "caption")}, kwargs=options)
    shown = package.Image.return_value
    assert run.track.mock_calls == [
        call(1.5, name="loss", step=7, context={"subset": "train"}),
        call(shown, name="a", step=1),
        call(shown, name="b", step=1),
        call(shown, name="c", step=None, context={"k": 1}),
    ]
    assert package.Image.mock_calls == [
        call("image", caption=""),
        call("image", caption="caption"),
        call("image", caption="caption", format="png"),
    ]
    tracker.finish()
    run.close.assert_called_once_with()


def mlflow(client):
    package = client("mlflow", "utils", "utils.validation")
    package.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 2
    package.utils.validation.MAX_PARAM_VAL_LENGTH = 10
    return package


def test_mlflow_run_and_values(client, caplog, monkeypatch):
    for variable in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "MLFLOW_TAGS", "MLFLOW_NESTED_RUN"):
        monkeypatch.delenv(variable, raising=False)
    package = mlflow(client)
    package.get_experiment_by_name.return_value = None
    tracker = recorded(
        "mlflow", "exp", logging_dir="store", tags='{"a": "b"}', run_name="run", description="d"
    )
    with caplog.at_level(logging.WARNING, "accelerate.tracking"):
        tracker.store_init_configuration({"a": 1, "long": "x" * 11, "b": 2, "c": np.int64(3)})
        tracker.log(VALUES, step=7)
    tracker.log_figure("figure", "f.png", dpi=3)
    tracker.log_artifacts("folder", "to")
    tracker.log_artifact("file")
    tracker.finish()
    assert package.mock_calls == [
        call.get_experiment_by_name("exp"),
        call.create_experiment(name="exp", artifact_location="store", tags={"a": "b"}),
        call.start_run(
            run_id=None,
            experiment_id=package.create_experiment.return_value,
            run_name="run",
            nested=False,
            tags={"a": "b"},
            description="d",
        ),
        call.log_params({"a": 1, "b": 2}),
        call.log_params({"c": 3}),
        call.log_metrics({"loss": 1.5, "n": 3, "nested/a": 1}, step=7),
        call.log_figure(figure="figure", artifact_file="f.png", dpi=3),
        call.log_artifacts(local_dir="folder", artifact_path="to"),
        call.log_artifact(local_path="file", artifact_path=None),
        call.end_run(),
    ]
    assert tracker.active_run is package.start_run.return_value
    said = " ".join(record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 3
    assert all(f"'{key}'" in said for key in ("long", "text", "none"))


def test_mlflow_variables_go_before_the_arguments(client, monkeypatch):
    package = mlflow(client)
    package.get_experiment_by_name.return_value.experiment_id = "17"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from-variable")
    monkeypatch.setenv("MLFLOW_RUN_ID", "id")
    monkeypatch.setenv("MLFLOW_TAGS", '{"v": "1"}')
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
    recorded("mlflow", "exp", run_id="other", tags={"a": "b"})
    assert package.mock_calls == [
        call.get_experiment_by_name("from-variable"),
        call.start_run(
            run_id="id",
            experiment_id="17",
            run_name=None,
            nested=True,
            tags={"v": "1"},
            description=None,
        ),
    ]
    monkeypatch.setenv("MLFLOW_TAGS", "v=1")
    with pytest.raises(ConfigurationError, match=r"MLFLOW_TAGS .*not a JSON object"):
        recorded("mlflow", "exp")


def test_clearml_task_of_its_own(client, monkeypatch):
    monkeypatch.delenv("CLEARML_PROJECT", raising=False)
    monkeypatch.setenv("CLEARML_TASK", "from-variable")
    package = client("clearml")
    package.Task.current_task.return_value = None
    tracker = recorded("clearml", "name", task_type="training")
    package.Task.init.assert_called_once_with(
        project_name="name", task_name="from-variable", task_type="training"
    )
    task = package.Task.init.return_value
    board = task.get_logger.return_value
    tracker.store_init_configuration(CONFIG)
    task.connect_configuration.assert_called_once_with(PLAIN)
    tracker.log(
        {"eval_loss": torch.tensor(1.5), "value_x": 2, "nested": {"a": 3}, "text": "t"}, step=7
    )
    tracker.log({"best": 4})
    tracker.log_images({"test_image": "i"}, step=1)
    tracker.log_table("eval_table", columns=["a"], data=[[1]], step=2)
    tracker.log_table("whole", data=[["a"], [1]])
    tracker.log_table("frame", dataframe="df")
    assert board.mock_calls == [
        call.report_scalar(title="loss", series="eval", value=1.5, iteration=7),
        call.report_scalar(title="value_x", series="train", value=2, iteration=7),
        call.report_scalar(title="nested/a", series="train", value=3, iteration=7),
        call.report_single_value(name="best", value=4),
        call.report_image(title="image", series="test", iteration=1, image="i"),
        call.report_table(title="table", series="eval", table_plot=[["a"], [1]], iteration=2),
        call.report_table(title="whole", series="train", table_plot=[["a"], [1]], iteration=None),
        call.report_table(title="frame", series="train", table_plot="df", iteration=None),
    ]
    with pytest.raises(ConfigurationError, match="rows in `data`"):
        tracker.log_table("nothing", columns=["a"])
    tracker.finish()
    task.close.assert_called_once_with()


def test_clearml_leaves_a_task_that_was_open_already(client):
    package = client("clearml")
    tracker = recorded("clearml", "name")
    assert tracker.task is package.Task.current_task.return_value
    tracker.finish()
    package.Task.init.assert_not_called()
    package.Task.current_task.return_value.close.assert_not_called()


def test_dvclive_new_and_given(client):
    package = client("dvclive")
    tracker = recorded("dvclive", "name", dir="here")
    tracker.store_init_configuration(CONFIG)
    tracker.log(VALUES, step=7)
    assert tracker.live.step == 7
    tracker.log({"loss": 1.0})
    tracker.finish()
    assert package.mock_calls == [
        call.Live(dir="here"),
        call.Live().log_params(PLAIN),
        call.Live().log_metric("loss", 1.5),
        call.Live().log_metric("n", 3),
        call.Live().log_metric("nested/a", 1),
        call.Live().next_step(),
        call.Live().log_metric("loss", 1.0),
        call.Live().next_step(),
        call.Live().end(),
    ]
    given = MagicMock()
    assert recorded("dvclive", live=given).tracker is given
    package.Live.assert_called_once_with(dir="here")  # none made for the second tracker


@pytest.mark.parametrize(
    ("name", "opened", "key", "again"),
    [
        ("wandb", "init", "id", {"project": "p", "id": "r1", "resume": "allow"}),
        ("trackio", "init", "name", {"project": "p", "name": "r1", "resume": "allow"}),
        ("comet_ml", "start", "id", {"project_name": "p", "experiment_key": "r1"}),
        ("aim", "Run", "hash", {"repo": ".", "run_hash": "r1"}),
    ],
)
def test_a_run_can_be_gone_on_with_by_its_key(client, name, opened, key, again):
    package = client(name)
    setattr(getattr(package, opened).return_value, key, "r1")
    place = {"logging_dir": "."} if name == "aim" else {}
    tracker = recorded(name, "p", **place)
    assert tracker.run_key == "r1"
    recorded(name, "p", **place, **type(tracker).resume_kwargs("r1"))
    assert getattr(package, opened).call_args.kwargs == again
    tracker.finish()
    assert tracker.run_key is None
