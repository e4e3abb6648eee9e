# SPDX-License-Identifier: Apache-2.0
"""Which trackers a run gets for what it asks, and what it is told about the others."""

import logging

import pytest

from accelerate.core.enums import LoggerType
from accelerate.core.errors import ConfigurationError
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    TensorBoardTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
    registry,
    start_trackers,
)


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False

    def __init__(self, run_name="r", **kwargs):
        super().__init__()
        self.calls = [("init", run_name, kwargs)]

    @property
    def tracker(self):
        return self.calls

    def start(self):
        self.calls.append(("start",))

    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.calls.append(("log", values, step, kwargs))
        return "logged"


@pytest.fixture
def installed(monkeypatch):
    """Only these packages are installed."""
    names = {"tensorboard", "wandb", "aim"}
    monkeypatch.setattr(registry, "is_available", lambda name: name in names)
    return names


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(registry, "LOGGER_TYPE_TO_CLASS", dict(LOGGER_TYPE_TO_CLASS))


def test_names_members_and_objects_once_each_in_order(installed):
    mine = Recorder()
    assert filter_trackers(None) == []
    assert filter_trackers("wandb") == [LoggerType.WANDB]
    assert filter_trackers(LoggerType.WANDB) == [LoggerType.WANDB]
    asked = ["wandb", mine, LoggerType.TENSORBOARD, "tensorboard", mine]
    assert filter_trackers(asked, "logs") == [LoggerType.WANDB, mine, LoggerType.TENSORBOARD]
    assert filter_trackers(("wandb",)) == [LoggerType.WANDB]


def test_all_is_what_is_installed_and_can_work(installed):
    mine = Recorder()
    assert set(get_available_trackers()) == {
        LoggerType.TENSORBOARD,
        LoggerType.WANDB,
        LoggerType.AIM,
    }
    assert filter_trackers("all", "logs") == get_available_trackers()
    assert filter_trackers(LoggerType.ALL) == [LoggerType.WANDB]  # the other two need a folder
    assert filter_trackers([mine, "all"]) == [mine, LoggerType.WANDB]


def test_one_that_is_not_installed_is_left_out_and_said(installed, caplog):
    with caplog.at_level(logging.WARNING, "accelerate.tracking"):
        assert filter_trackers(["mlflow", "wandb"]) == [LoggerType.WANDB]
    (record,) = caplog.records
    assert "mlflow, which is not installed" in record.getMessage()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("tensorbord", "did you mean tensorboard"),
        (["wandb", 5], "contains 5, which is not a tracker"),
        ([Recorder], "the class Recorder: pass an instance"),
        ("tensorboard", "needs a folder"),
        ("aim", "needs a folder"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(installed, asked, told):
    with pytest.raises(ConfigurationError, match=told):
        filter_trackers(asked)


def test_a_registered_class_can_be_named(installed, table):
    register_tracker_class(Recorder)
    assert filter_trackers("recorder") == ["recorder"]
    (tracker,) = start_trackers(
        ["recorder"], "project", None, {"lr": 1.0}, {"recorder": {"size": 2}}
    )
    assert tracker.calls == [("init", "project", {"size": 2}), ("start",), ("config", {"lr": 1.0})]
    with pytest.warns(UserWarning, match="'recorder' referred to Recorder"):
        register_tracker_class(Recorder)


def test_registering_checks_the_class(table):
    class Nameless(GeneralTracker):
        requires_logging_directory = False

    for wrong in (dict, 5):
        with pytest.raises(ConfigurationError, match="subclass"):
            register_tracker_class(wrong)
    with pytest.raises(AttributeError, match="name"):
        register_tracker_class(Nameless)


def test_a_tracker_class_says_what_it_lacks():
    class Nothing(GeneralTracker):
        pass

    class NoTracker(GeneralTracker):
        name = "x"
        requires_logging_directory = False

    with pytest.raises(
        NotImplementedError, match="`name`, `requires_logging_directory`, `tracker`"
    ):
        Nothing()
    with pytest.raises(NotImplementedError, match="lacks `tracker`"):
        NoTracker()
    blank = GeneralTracker(_blank=True)
    assert (blank.start(), blank.log({}), blank.store_init_configuration({}), blank.finish()) == (
        None,
    ) * 4


def test_start_makes_each_with_its_own_arguments(tmp_path):
    mine = Recorder()
    board, same = start_trackers(
        [LoggerType.TENSORBOARD, mine],
        "project",
        tmp_path,
        {"lr": 1.0},
        {"tensorboard": {"filename_suffix": ".x"}},
    )
    assert isinstance(board, TensorBoardTracker)
    assert (same is mine, mine.calls[1:]) == (True, [("start",), ("config", {"lr": 1.0})])
    assert board.writer.get_logdir() == str(tmp_path / "project")
    assert any(path.name.endswith(".x") for path in (tmp_path / "project").iterdir())
    board.finish()


def test_arguments_for_a_tracker_that_is_none_are_an_error():
    with pytest.raises(ConfigurationError, match="did you mean tensorboard"):
        start_trackers([Recorder()], "project", None, init_kwargs={"tensorbord": {}})
    # a script may bring the arguments of trackers that this run does not use
    start_trackers(
        [Recorder()], "project", None, init_kwargs={"wandb": {"entity": "me"}, "recorder": {}}
    )
    with pytest.raises(ConfigurationError, match="needs a dict"):
        start_trackers([Recorder()], "project", None, config=["lr"])


def test_the_table_holds_every_tracker_of_the_api():
    assert set(LOGGER_TYPE_TO_CLASS) == {*LoggerType.list(), "local"} - {"all"}
    everywhere = {name for name, kind in LOGGER_TYPE_TO_CLASS.items() if not kind.main_process_only}
    with_folder = {
        name for name, kind in LOGGER_TYPE_TO_CLASS.items() if kind.requires_logging_directory
    }
    assert everywhere == {"wandb", "swanlab", "trackio"}
    assert with_folder == {"tensorboard", "aim", "local"}
