# SPDX-License-Identifier: Apache-2.0
"""The rank-aware logger of a lone process: levels, lines, and its need of a state."""

import logging

import pytest
from ranks import run_ranks

from accelerate.logging import get_logger
from accelerate.state import PartialState


@pytest.fixture
def state():
    return PartialState(cpu=True)


def test_it_names_rank_and_caller(state, caplog):
    logger = get_logger("some.script")
    with caplog.at_level("INFO"):
        logger.info("loss %.1f", 0.5)
        logger.warning_once("careful")
        logger.warning_once("careful")
        logger.info("all in turn", main_process_only=False, in_order=True)
    assert [record.getMessage() for record in caplog.records] == [
        "[RANK 0] loss 0.5",
        "[RANK 0] careful",
        "[RANK 0] all in turn",
    ]
    assert {record.filename for record in caplog.records} == {"test_logging.py"}


def test_other_ranks_are_silent(state, caplog):
    state.process_index = 1
    logger = get_logger("some.script")
    with caplog.at_level("INFO"):
        logger.info("hidden")
        logger.info("shown", main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 1] shown"]


def test_level_by_argument_and_variable(state, monkeypatch):
    assert get_logger("quiet", "ERROR").logger.level == logging.ERROR
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    assert get_logger("loud").logger.level == logging.DEBUG
    logging.getLogger().setLevel(logging.WARNING)


def test_a_requested_level_is_shown_without_a_handler_and_once_with_one():
    script = """
        import logging
        from accelerate import PartialState
        from accelerate.logging import get_logger
        PartialState(cpu=True)
        logger = get_logger("my.script", log_level="INFO")
        logger.info("shown")
        logger.debug("too low")
        logger.info("of all", main_process_only=False, in_order=True)
        get_logger("other").info("not requested")
        logging.getLogger("plain").info("not requested either")
        logging.basicConfig(format="configured: %(message)s")
        logger.info("once")
        handler = logging.getLogger().handlers[0]
        handler.setLevel("WARNING")
        logger.info("below the level of the handler")
        logger.warning("above it")
        assert handler.level == logging.WARNING and logging.lastResort.level == logging.WARNING
        assert not logger.logger.handlers
        """
    main, other = run_ranks(script, 2)
    assert main.stderr.splitlines() == [
        "[RANK 0] shown",
        "[RANK 0] of all",
        "configured: [RANK 0] once",
        "[RANK 0] below the level of the handler",
        "configured: [RANK 0] above it",
    ]
    assert other.stderr.splitlines() == ["[RANK 1] of all"]


def test_a_state_is_needed():
    with pytest.raises(RuntimeError, match="initialize the accelerate state"):
        get_logger("early").info("too early")
