# SPDX-License-Identifier: Apache-2.0
"""What users write reaches batch scripts, manifests and host files as it is, or is refused; nothing is interpreted."""

import shlex

import pytest
import yaml

from accelerate.core.errors import ConfigurationError
from accelerate.launchers.kubernetes import KubernetesLauncher
from accelerate.launchers.mpi import first_host
from accelerate.launchers.slurm import SlurmLauncher
from accelerate.launchers.spec import LaunchSpec, Program
from accelerate.launchers.tpu import PodLauncher

NASTY = [
    "a\n#SBATCH --uid=0", "two words", "it's", 'say "x"', "$(touch x)", "`touch x`", "a;b", "-x", "漢字 ü", "", "a\\b",
    "$RANK", "*", "a\tb",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _outside(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.mark.parametrize("text", NASTY)
def test_a_batch_script_holds_what_was_given(text):
    program = Program(f"{text}.py", (text, "--name", text))
    spec = LaunchSpec(program, num_processes=2, variables={"NAME": text})
    script = SlurmLauncher(spec).batch_script()
    # sbatch reads directives up to the first command.
    comments = script.partition("\n\n")[0].splitlines()[1:]
    directives = [line for line in comments if line.startswith("#SBATCH")]
    assert [line.partition("=")[0] for line in directives] == [
        "#SBATCH --job-name", "#SBATCH --nodes", "#SBATCH --ntasks", "#SBATCH --ntasks-per-node",
        "#SBATCH --requeue", "#SBATCH --signal",
    ]  # fmt: skip
    assert all(len(line.split()) == 2 for line in directives)
    words = shlex.split(script.partition("export NAME=")[2], comments=False)
    assert words[0] == text
    assert words[-4:] == program.words and words[-3:] == [text, "--name", text]


@pytest.mark.parametrize("text", NASTY)
def test_options_for_sbatch_are_quoted_or_refused(text):
    options = shlex.join(["--time=1", f"--comment={text}"])
    launcher = SlurmLauncher(LaunchSpec(Program(__file__), slurm_options=options))
    if "\n" in text or "\t" in text:
        with pytest.raises(ConfigurationError, match="control character"):
            launcher.check()
        with pytest.raises(ConfigurationError, match="control character"):
            launcher.batch_script()
        return
    launcher.check()
    (line,) = [line for line in launcher.batch_script().splitlines() if "--comment" in line]
    assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--comment={text}"]


def test_a_dry_run_needs_no_programs(monkeypatch):
    from accelerate.launchers import slurm

    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    launcher = SlurmLauncher(LaunchSpec(Program(__file__)))
    launcher.check()
    assert launcher.dry_run().startswith("#!/bin/bash")
    with pytest.raises(ConfigurationError, match="not on the PATH"):
        launcher.run()


@pytest.mark.parametrize("text", [text for text in NASTY if text])
def test_a_manifest_holds_what_was_given(text):
    spec = LaunchSpec(Program(f"{text}.py", (text,)), variables={"NAME": text}, image="image")
    _, job = yaml.safe_load_all(KubernetesLauncher(spec).dry_run())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    literal = text.replace("$", "$$")  # Kubernetes makes one of two, and expands $(NAME)
    assert container["command"][-2:] == [
        f"./{literal}.py" if text.startswith("-") else f"{literal}.py",
        literal,
    ]
    assert {"name": "NAME", "value": literal} in container["env"]
    assert job["metadata"]["name"].strip("-") == job["metadata"]["name"]


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "a b", "a;b", "$(x)", "", "a\nb", "`x`", "a'b"]
)
def test_what_is_no_host_is_refused(name, tmp_path):
    with pytest.raises(ConfigurationError, match="host name or address"):
        LaunchSpec(Program(__file__), main_process_ip=name).check()
    pod = PodLauncher(LaunchSpec(Program(__file__), vm=(name,), tpu_zone="zone"))
    with pytest.raises(ConfigurationError):
        pod.check()
    if name and not set(name) & set(" \n"):
        hostfile = tmp_path / "hosts"
        hostfile.write_text(f"node1\n{name} slots=2\n")
        with pytest.raises(ConfigurationError, match="host name or address"):
            first_host(str(hostfile))


def test_a_script_whose_name_begins_with_a_hyphen_is_no_option_of_python():
    assert Program("-c.py").argv("python") == ["python", "-u", "./-c.py"]
