# SPDX-License-Identifier: Apache-2.0
"""The examples of large models."""

import sys

import pytest


def test_plan(example, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["plan.py", "--machine", "2x1GB", "--batch", "8x64"])
    example("big_model/plan").main()
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"ddp", "fsdp", "fsdp+ckpt"} <= {name for name, text in lines.items() if text.endswith(", fits")}
    assert "not estimated" in lines["pp"]
