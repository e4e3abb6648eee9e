# SPDX-License-Identifier: Apache-2.0
"""The page on JSON output: each command prints one document, with the fields and types of its table."""

import json
import re
from pathlib import Path

import pytest
import torch
from planted_runs import planted_run

from accelerate import Accelerator
from accelerate.certify.certificate import Certificate, Row
from accelerate.certify.comparison import Difference, Item
from accelerate.commands import certify, checkpoint, config, env, plan, report
from accelerate.utils import ProjectConfiguration

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
SECTIONS = {
    title: re.findall(r"^\| `([\w.\[\]]+)` \| ([^|]+) \|", text, re.MULTILINE)
    for title, text in re.findall(r"^## accelerate (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
TYPES = {
    "string": (str,),
    "number": (int, float),
    "boolean": (bool,),
    "list": (list,),
    "object": (dict,),
    "null": (type(None),),
    "any": (object,),
}
MODEL = """
import torch

def make_model():
    return torch.nn.Linear(4, 2)
"""


def no_constant(name):
    raise ValueError(f"{name} is not JSON")


@pytest.fixture
def document(tmp_path, monkeypatch, capsys):
    """Run a command, and return its exit code and its document."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(module, *words):
        capsys.readouterr()
        code = 0
        try:
            module.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code or 0
        return code, json.loads(capsys.readouterr().out, parse_constant=no_constant)

    return run


def has_type(value, kinds):
    """Whether a value has one of the types that a table names. A truth value is not a number."""
    return any(
        isinstance(value, TYPES[kind]) and not (kind == "number" and isinstance(value, bool))
        for kind in kinds.split(" or ")
    )


def objects_at(document, path):
    """The objects at a path such as `layouts[]` or `summary`; without a path the document itself."""
    found = [document]
    for part in filter(None, path.split(".")):
        found = [parent[part.removesuffix("[]")] for parent in found]
        if part.endswith("[]"):
            found = [item for items in found for item in items]
    return found


def check(title, document):
    """The document, and each object in its lists, has the fields of a section with their types and no others."""
    rows = SECTIONS[title]
    for path, kind in rows:
        parent, _, name = path.rpartition(".")
        kinds, optional, _ = kind.partition(", if ")
        for item in objects_at(document, parent):
            assert optional or name in item, path
            assert name not in item or has_type(item[name], kinds), (path, item[name])
    for parent in {path.rpartition(".")[0] for path, _ in rows}:
        names = {path.rpartition(".")[2] for path, _ in rows if path.rpartition(".")[0] == parent}
        is_open = parent in ("machine", "summary", "events[]")  # only the usual fields are listed
        for item in objects_at(document, parent):
            assert is_open or item.keys() <= names, (parent, item.keys() - names)


def test_config_and_env(document, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("num_processes: 2\nmixed_precision: bf16\n")
    code, shown = document(config, "show", "--json", "--config_file", file, "--cpu")
    assert code == 0 and shown["file"] == str(file)
    check("config show", shown)
    for words in ([], ["--config_file", file]):
        code, shown = document(env, "--json", *words)
        assert code == 0
        check("env", shown)


def test_plan(document, tmp_path):
    (tmp_path / "planned_model.py").write_text(MODEL)
    code, shown = document(
        plan, "planned_model:make_model", "--batch", "8x4:float32", "--machine", "1x1GB", "--json"
    )  # fmt: skip
    assert code == 0 and shown["layouts"][0]["fits"]
    check("plan", shown)


def test_checkpoints(document, tmp_path):
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True),
    )
    accelerator.prepare(torch.nn.Linear(3, 3))
    for _ in range(2):
        accelerator.save_state()
    for damage, expected in ((False, 0), (True, 1)):
        if damage:
            (tmp_path / "checkpoints/checkpoint_0/model.safetensors").unlink()
        for action in ("list", "verify"):
            code, shown = document(checkpoint, action, tmp_path, "--json")
            assert code == expected and len(shown["checkpoints"]) == 2
            check("checkpoint list, verify", shown)


def test_report(document, tmp_path):
    code, shown = document(report, planted_run(tmp_path / "run", 300, 3, slow=2), "--json")
    assert code == 0 and shown["last"] == 300 and len(shown["ranks"]) == 3
    check("report", shown)


def test_certify(document, tmp_path, monkeypatch):
    """The document of a certificate whose layouts were compared, of which one differs."""
    (tmp_path / "train.py").write_text("print()\n")

    def compare(self, folder, report):
        difference = Difference(1, "loss", "0", 0.5, 0.1, 1.0)
        equal = Row("ddp:2", "equal", {"loss": Item(4, 0.1, "0", 1)})
        self.rows = [equal, Row("fsdp:2", "different", {"loss": Item(4)}, difference, ["why"])]

    monkeypatch.setattr(Certificate, "run", compare)
    code, shown = document(certify, "--layouts", "ddp:2", "fsdp:2", "--json", "train.py")
    assert code == 1 and shown["verdict"] == "different"
    check("certify", shown)


@pytest.mark.parametrize(
    "module, words, code",
    [
        (config, ["show", "--config_file", "absent.yaml"], 2),
        (plan, ["absent:model", "--batch", "8x4"], 2),
        (checkpoint, ["verify", "s3://"], 2),
        (report, ["absent"], 1),
    ],
)
def test_nothing_is_printed_on_an_error(module, words, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        module.main([*words, "--json"])
    output = capsys.readouterr()
    assert (end.value.code, output.out) == (code, "") and output.err.startswith("accelerate: error")


def test_every_command_of_the_page_has_a_section():
    named = re.findall(
        r"^\| `accelerate ([a-z]+(?: (?:show|list))?)[^`]*--json", PAGE, re.MULTILINE
    )
    assert len(named) == 6
    assert all(any(title.startswith(name) for title in SECTIONS) for name in named)
