# SPDX-License-Identifier: Apache-2.0
"""Verdicts on layouts from records that are written by hand: tolerance, first difference, causes, file and codes."""

import json

import pytest
import torch
import yaml

from accelerate.certify import certificate as certificates
from accelerate.certify import layouts
from accelerate.certify.certificate import Certificate
from accelerate.certify.comparison import Comparison
from accelerate.certify.runs import Recorded, Script
from accelerate.certify.settings import Settings
from accelerate.core.errors import ConfigurationError
from accelerate.launchers.spec import Program

NAMES = ("first.weight", "first.bias", "second.weight")


def step(number, noise=0.0):
    """A step as it is recorded; `noise` is relative to each element."""
    generator = torch.Generator().manual_seed(number)
    moves = torch.Generator().manual_seed(int(noise * 1e12))

    def values(*shape):
        plain = torch.randn(shape, generator=generator, dtype=torch.float64)
        moved = plain * (1 + noise * torch.randn(shape, generator=moves, dtype=torch.float64))
        return moved.float()

    tensors = {"batch/0.0": torch.arange(8.0).reshape(4, 2) + number}
    tensors["output/first"] = values(4, 3)
    tensors["output/second"] = values(4, 3)
    tensors["loss/0"] = values()
    for name in NAMES:
        tensors[f"gradient/{name}"] = values(3, 3)
    tensors["options/group 0 lr"] = torch.tensor(0.1, dtype=torch.float64)
    for name in NAMES:
        tensors[f"parameter/{name}"] = values(3, 3)
    tensors["buffer/count"] = torch.tensor(number)
    tensors["state/0 momentum"] = values(3, 3)
    return tensors


class Runs:
    """Stands in for the runs of a script: each is two steps with noise, which `change` has altered."""

    def __init__(self):
        self.change = lambda name, number, tensors: None
        self.info = {}
        self.failed = {}
        self.made = []
        self.noise = 1e-8

    def record(self, script, layout, folder, installation=None, **changes):
        folder.mkdir(parents=True)
        name = folder.name
        self.made.append(name)
        if name in self.failed:
            (folder / "error.json").write_text(json.dumps(self.failed[name]))
            return Recorded(folder, 1)
        noise = self.noise * (name != "reference-2") * len(name)
        if changes.get("perturb"):
            noise = 20 * self.noise
        if script.settings.steps == 2:
            for number in (1, 2):
                tensors = step(number, noise)
                self.change(name, number, tensors)
                torch.save(tensors, folder / f"step_{number}.pt")
            info = {
                "processes": layout.processes,
                "shards": layout.shards,
                "layout": "DDP",
                "draws": [],
                **self.info,
            }
            (folder / "run.json").write_text(json.dumps(info))
        return Recorded(folder, 0)


@pytest.fixture
def runs(monkeypatch):
    made = Runs()
    monkeypatch.setattr(
        Script, "record", lambda script, *args, **changes: made.record(script, *args, **changes)
    )
    return made


@pytest.fixture
def certify(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")

    def run(*texts, steps=2, **options):
        script = Script(Program("train.py", ("--lr", "1")), {}, Settings("", steps), cpu=True)
        certificate = Certificate(script, [layouts.parse(text) for text in texts], **options)
        shown = []
        certificate.run(tmp_path / f"runs-{len(list(tmp_path.iterdir()))}", shown.append)
        assert shown == certificate.rows
        return certificate

    return run


def test_equal_layouts_share_the_runs_of_their_reference(certify, runs):
    certificate = certify("ddp:2", "fsdp:2", "tp:2")
    assert [row.verdict for row in certificate.rows] == ["equal"] * 3
    assert certificate.code == 0
    # tp:2 reads one batch at a time, and has a reference of its own.
    assert [name for name in runs.made if "reference" in name] == ["reference-2", "reference-1"]
    item = certificate.rows[0].items["gradient"]
    assert (item.tensors, item.verdict) == (6, "equal")
    assert 0 < item.ratio < 1


@pytest.mark.parametrize(
    "kind, name, direction, module",
    [
        ("batch", "0.0", "data", ""),
        ("output", "second", "forward", "second"),
        ("loss", "0", "forward", ""),
        ("gradient", "second.weight", "backward", "second"),
        ("options", "group 0 lr", "optimizer", ""),
        ("parameter", "first.bias", "optimizer", "first"),
        ("buffer", "count", "buffer", ""),
        ("state", "0 momentum", "optimizer", ""),
    ],
)
def test_the_first_tensor_that_differs_is_named(certify, runs, kind, name, direction, module):
    def change(run, number, tensors):
        if run == "0-ddp2" and number == 2:
            for later in ("state/0 momentum", "gradient/first.weight", f"{kind}/{name}"):
                if list(tensors).index(later) >= list(tensors).index(f"{kind}/{name}") or (
                    kind == "gradient"
                ):
                    tensors[later] = tensors[later] * 1.001 + 1

    runs.change = change
    row = certify("ddp:2").rows[0]
    assert (row.verdict, row.difference.step) == ("different", 2)
    data = row.as_data()["difference"]
    assert (data["kind"], data["name"]) == (kind, name)
    assert (data["direction"], data["module"]) == (direction, module)
    assert row.difference.error > row.difference.tolerance
    assert name in row.text() and direction in row.text() and row.notes


def test_what_rounding_changes_is_not_called_equal(certify, runs):
    """A tensor of rounding noise is named; if it is half of all gradients, nothing can be told of them."""

    def change(run, number, tensors):
        tensors["gradient/first.bias"] = size * torch.randn(3, 3)

    size = 1e-9
    runs.change = change
    row = certify("ddp:2").rows[0]
    assert row.verdict == "equal up to perturbation"
    assert row.items["gradient"].vague.keys() == {"first.bias"}
    assert "first.bias" in row.text()
    size = 100.0
    certificate = certify("ddp:2")
    assert certificate.verdict == "not comparable"
    assert certificate.code == 3
    # A difference elsewhere is still one.
    runs.change = lambda run, number, tensors: (
        change(run, number, tensors),
        run == "0-ddp2" and tensors["loss/0"].mul_(1.01),
    )
    assert certify("ddp:2").rows[0].difference.kind == "loss"


@pytest.mark.parametrize(("small", "in_layout"), [(1e-3, 1.05e-3), (0.0, 1e-6)])
def test_elements_with_an_unsteady_gradient_are_not_compared(certify, runs, small, in_layout):
    """Adam divides by the size of a gradient: an element that is almost zero moves its parameter by another number."""

    def change(run, number, tensors):
        gradient = tensors["gradient/second.weight"]
        gradient.fill_(1.0)
        gradient[0, 0] = small
        if run.startswith("perturbed"):
            gradient.mul_(1 + 1e-5)
        if run == "0-ddp2":
            gradient[0, 0] = in_layout
            for row, column in moved:
                tensors["parameter/second.weight"][row, column] += 0.01

    runs.change = change
    moved = [(0, 0)]
    assert certify("ddp:2").verdict == "equal"
    moved.append((1, 1))
    assert certify("ddp:2").rows[0].difference.name == "second.weight"


def test_a_low_precision_has_a_verdict_of_its_own(certify, runs):
    def change(run, number, tensors):
        for name, tensor in tensors.items():
            if name.startswith("parameter/"):
                noise = torch.randn(3, 3, generator=torch.Generator().manual_seed(len(runs.made)))
                tensors[name] = tensor * (1 + 1e-3 * noise)

    runs.change = change
    row = certify("ddp:2").rows[0]
    assert row.verdict == "equal up to perturbation"
    assert row.items["parameter"].spread > 1e-4
    assert f"parameter: rounding changes {row.items['parameter'].moved}" in row.text()
    assert row.items["gradient"].verdict == "equal"


def test_statistics_of_a_batch_and_random_numbers_are_not_comparable(certify, runs):
    def change(run, number, tensors):
        tensors["buffer/second.running_mean"] = torch.ones(3)
        if run == "0-ddp2":
            tensors["output/second"] += 1

    runs.change = change
    row = certify("ddp:2").rows[0]
    assert row.verdict == "not comparable"
    assert "SyncBatchNorm" in row.notes[0]
    runs.change = lambda run, number, tensors: run == "0-ddp2" and tensors["loss/0"].add_(1)
    runs.info["draws"] = ["encoder.noise"]
    row = certify("ddp:2").rows[0]
    assert row.verdict == "not comparable"
    assert "encoder.noise" in row.notes[0]


def test_a_value_that_is_not_finite_differs_from_one_that_is(certify, runs):
    def change(run, number, tensors):
        if run == "0-ddp2":
            tensors["gradient/first.bias"][0, 0] = torch.nan

    runs.change = change
    certificate = certify("ddp:2")
    assert certificate.rows[0].difference.name == "first.bias"
    # JSON has no infinity.
    assert json.loads(json.dumps(certificate.as_data(), allow_nan=False))["verdict"] == "different"
    comparison = Comparison(
        [{"loss/0": torch.tensor(torch.nan)}], [{"loss/0": torch.tensor(torch.nan)}]
    )
    assert not comparison.differences


def test_replicas_that_differ_are_named_with_the_dimension(certify, runs):
    runs.info["replicas"] = {
        "step": 1,
        "kind": "gradient",
        "name": "first.bias",
        "rank": 1,
        "dimension": "tp",
    }
    row = certify("fsdp:2xtp:2").rows[0]
    assert row.verdict == "different"
    assert row.difference.kind == "gradient"
    assert "rank 1" in row.text() and "along tp" in row.text()


def test_against_itself_compares_bit_by_bit(certify, runs):
    row = certify("ddp:2", against="itself").rows[0]
    assert row.verdict == "different"
    assert row.difference.tolerance == 0
    assert runs.made == ["0-ddp2", "again"]
    runs.noise = 0.0
    assert certify("ddp:2", against="itself").rows[0].verdict == "equal"


def test_another_installation_has_a_tolerance(certify, runs, tmp_path, monkeypatch):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert certify("ddp:2", against=str(tmp_path / "venv")).rows[0].verdict == "equal"
    assert runs.made == ["0-ddp2", "other", "perturbed"]
    with pytest.raises(ConfigurationError, match="no-such-revision"):
        certify("ddp:2", against="no-such-revision")


def test_a_reference_of_several_ranks_reads_as_many_batches(certify, runs):
    reference = layouts.parse("ddp:2")
    assert certify("fsdp:2", reference=reference).verdict == "equal"
    for other in ("tp:2", "ddp:4"):
        with pytest.raises(ConfigurationError, match="--reference ddp:2"):
            certify(other, reference=reference)
    assert certify("fsdp:2xtp:2", reference=layouts.parse("tp:2")).verdict == "equal"


def test_why_a_run_has_no_verdict(certify, runs):
    def notes(*texts, **options):
        certificate = certify(*texts, **options)
        assert (certificate.verdict, certificate.code) == ("could not run", 2)
        return certificate.rows[0].notes[0]

    runs.failed["0-ddp2"] = {"rank": 1, "cause": "ValueError: no such thing"}
    assert "rank 1" in notes("ddp:2") and "no such thing" in notes("ddp:2")
    runs.failed = {"reference-2": {"rank": 0, "cause": "MemoryError: too large"}}
    assert "reference" in notes("ddp:2")
    runs.failed = {}
    # A rank reads more batches than another one.
    runs.info["uneven"] = {"step": 2, "batches": [1, 2]}
    assert certify("ddp:2").verdict == "equal"
    runs.change = lambda run, number, tensors: (
        run == "0-ddp2" and number == 2 and tensors["loss/0"].add_(1)
    )
    assert "rank" in notes("ddp:2") and "[1, 2]" in notes("ddp:2")
    runs.change = lambda run, number, tensors: None
    runs.info.clear()
    # The script ends by itself before its last step, or without one.
    assert "before any prepared optimizer took a step" in notes("ddp:2", steps=3)
    runs.info["shards"] = 1
    assert "parallelism_config" in notes("ddp:2")
    runs.info.clear()
    runs.change = lambda run, number, tensors: tensors.pop("batch/0.0")
    assert "accelerator.prepare" in notes("ddp:2")
    runs.change = lambda run, number, tensors: tensors["batch/0.0"].add_(
        run.startswith("perturbed")
    )
    assert "set_seed" in notes("ddp:2")
    runs.change = lambda run, number, tensors: tensors["output/first"].add_(
        run.startswith("perturbed")
    )
    assert "seed" in notes("ddp:2") and "model" in notes("ddp:2")


def test_the_number_of_steps_that_a_script_made(tmp_path):
    (tmp_path / "step_1.pt").touch()
    assert "1 of 4" in Recorded(tmp_path, 0).reason(4)
    (tmp_path / "log.txt").write_text("first\nKilled\n\n")
    assert "137: Killed" in Recorded(tmp_path, 137).reason(4)


def test_a_certificate_can_be_read_again(certify, runs, tmp_path):
    runs.change = lambda run, number, tensors: run == "1-tp2" and tensors["loss/0"].add_(1)
    certificate = certify("fsdp:2", "tp:2")
    path = tmp_path / "certificate.yaml"
    certificate.write(path)
    data = yaml.safe_load(path.read_text())
    assert data["command"] == ["train.py", "--lr", "1"]
    assert data["layouts"][0]["mesh"] == {"fsdp": 2}
    assert data["layouts"][1]["difference"]["kind"] == "loss"
    assert data["layouts"][0]["items"][0]["kind"] == "batch"
    again, verdicts = certificates.read(path)
    assert verdicts == {"fsdp:2": "equal", "tp:2": "different"}
    assert again.script == certificate.script
    assert {**again.as_data(), "layouts": [], "verdict": ""} == {
        **data,
        "layouts": [],
        "verdict": "",
    }

    def refused(text):
        path.write_text(text)
        with pytest.raises(ConfigurationError) as error:
            certificates.read(path)
        return str(error.value)

    text = path.read_text()
    assert "steps" in refused(text.replace("steps: 2\n", ""))
    assert "certificate" in refused("[1, 2]")
    assert "certificate" in refused("\x00{")
    assert "ddp" in refused(text.replace("fsdp:2", "fsdp;2"))
    (tmp_path / "train.py").write_text("pass  # changed\n")
    assert "script_sha256" in refused(text)
    (tmp_path / "train.py").unlink()
    assert "train.py" in refused(text)
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"certificate\.yaml"):
        certificates.read(path)


def test_the_worst_verdict_is_that_of_the_command(certify, runs):
    runs.failed["0-fsdp2"] = {"rank": 0, "cause": "ValueError: not here"}
    assert certify("fsdp:2", "tp:2").code == 2
    runs.change = lambda run, number, tensors: run == "1-tp2" and tensors["loss/0"].add_(1)
    assert certify("fsdp:2", "tp:2").code == 1


@pytest.mark.parametrize(
    "change, fact",
    [
        ({"steps": 0}, "--steps 0"),
        ({"dtype": "float65"}, "float65"),
        ({"program": "missing.py"}, "missing.py"),
        ({"cpu": False}, "ddp:2 needs 2 devices"),
        ({"base": {"distributed_type": "DEEPSPEED"}}, "distributed_type: DEEPSPEED"),
        ({"base": {"compute_environment": "AMAZON_SAGEMAKER"}}, "compute_environment"),
    ],
)
def test_what_is_refused_before_any_run(tmp_path, monkeypatch, runs, change, fact):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.setattr(
        "accelerate.core.system.accelerators", lambda: certificates.system.Accelerators("cuda", 1)
    )
    script = Script(
        Program(change.get("program", "train.py")),
        change.get("base", {}),
        Settings("", change.get("steps", 2), dtype=change.get("dtype")),
        change.get("cpu", True),
    )
    with pytest.raises(ConfigurationError, match=fact):
        Certificate(script, [layouts.parse("ddp:2")]).run(tmp_path / "runs", print)
    assert not runs.made


@pytest.mark.parametrize(
    "text, processes, shards",
    [
        ("ddp:2", 2, 2),
        ("fsdp:2xtp:4", 8, 2),
        ("ddp:2xfsdp:3", 6, 6),
        ("pp:2xcp:1", 2, 1),
        ("single", 1, 1),
    ],
)
def test_layouts(text, processes, shards):
    layout = layouts.parse(text)
    assert (layout.processes, layout.shards) == (processes, shards)
    assert layouts.parse("tp:4xfsdp:2xcp:1").ordered == "fsdp:2xtp:4"
    assert layouts.is_layout(text)


@pytest.mark.parametrize(
    "text", ["", "ddp", "ddp:0", "ddp:2x", "dp:2", "ddp:2xddp:2", "tp:-1", "tp:2.5", "tp:1234567"]
)
def test_wrong_layouts(text):
    with pytest.raises(ConfigurationError, match="ddp:2 or fsdp:2xtp:2"):
        layouts.parse(text)


def test_the_layout_replaces_that_of_a_configuration_file():
    base = {
        "mixed_precision": "bf16",
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": {"fsdp_offload_params": True},
        "parallelism_config": {
            "parallelism_config_tp_size": 8,
            "parallelism_config_cp_comm_strategy": "alltoall",
        },
    }
    assert layouts.parse("ddp:2").configuration(True, base) == {
        "mixed_precision": "bf16",
        "num_processes": 2,
        "use_cpu": True,
        "distributed_type": "MULTI_CPU",
    }
    made = layouts.parse("fsdp:2xtp:2").configuration(False, base)
    assert made["fsdp_config"]["fsdp_offload_params"] is True
    assert made["distributed_type"] == "FSDP"
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "sp": 1, "tp": 2}
    assert made["parallelism_config"] == {
        "parallelism_config_cp_comm_strategy": "alltoall",
        **{f"parallelism_config_{name}_size": size for name, size in sizes.items()},
    }
    assert layouts.SINGLE.configuration(False, base)["distributed_type"] == "NO"
