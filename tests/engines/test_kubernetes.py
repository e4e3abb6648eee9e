# SPDX-License-Identifier: Apache-2.0
"""The manifest that `--engine kubernetes --dry_run` prints, against Kubernetes' own schema."""

import pytest
import yaml
from engines import LAUNCH, environment, need, run


@pytest.fixture
def validate():
    try:
        import kubernetes_validate
    except ImportError:
        need(False, "needs the schemas of Kubernetes (pip install kubernetes-validate)")

    def check(document):
        # The oldest one that has all of the manifest and is still served somewhere, and the newest.
        for version in ("1.28", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)

    return check


@pytest.mark.parametrize(
    "options",
    [
        ["--num_processes", 8, "--num_machines", 2, "--mixed_precision", "bf16", "--max_restarts", 3, "--tee", 3],
        ["--num_processes", 1, "--cpu", "--num_cpu_threads_per_process", 4, "--rdzv_conf", "join_timeout=60"],
    ],
)
def test_the_manifest_is_valid(tmp_path, validate, options):
    command = [*LAUNCH, "--engine", "kubernetes", "--dry_run", "--image", "registry.example/train:1", *options]
    env = environment(tmp_path / "home")
    del env["ACCELERATE_USE_CPU"], env["OMP_NUM_THREADS"]
    service, job = yaml.safe_load_all(run([*command, "/app/My_Train.py", "--name", "$(HOSTNAME)"], env, tmp_path))
    for document in (service, job):
        validate(document)
    machines = 2 if 8 in options else 1
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = container["command"]
    # The program's own words stay what they are; a restart of all machines is so many failed pods.
    assert words[-3:] == ["/app/My_Train.py", "--name", "$$(HOSTNAME)"]
    assert job["spec"]["backoffLimit"] == (6 if machines == 2 else 0)
    assert ("--tee" in words) == (machines == 2) and ("--rdzv_conf" in words) == (machines == 1)
    threads = [item["value"] for item in container["env"] if item["name"] == "OMP_NUM_THREADS"]
    assert threads == ([] if machines == 2 else ["4"])
    # A schema that takes anything would prove nothing.
    container["imagee"] = container.pop("image")
    with pytest.raises(Exception, match="imagee"):
        validate(job)
