# SPDX-License-Identifier: Apache-2.0
"""The manifests that `--engine kubernetes --dry_run` prints, and those of the examples, against Kubernetes' schema."""

import pytest
import yaml
from engines import LAUNCH, ROOT, environment, need, run


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
        [
            "--num_processes",
            8,
            "--num_machines",
            2,
            "--mixed_precision",
            "bf16",
            "--max_restarts",
            3,
            "--tee",
            3,
        ],
        [
            "--num_processes",
            1,
            "--cpu",
            "--num_cpu_threads_per_process",
            4,
            "--rdzv_conf",
            "join_timeout=60",
        ],
    ],
)
def test_the_manifest_is_valid(tmp_path, validate, options):
    command = [
        *LAUNCH,
        "--engine",
        "kubernetes",
        "--dry_run",
        "--image",
        "registry.example/train:1",
        *options,
    ]
    env = environment(tmp_path / "home")
    del env["ACCELERATE_USE_CPU"], env["OMP_NUM_THREADS"]
    service, job = yaml.safe_load_all(
        run([*command, "/app/My_Train.py", "--name", "$(HOSTNAME)"], env, tmp_path)
    )
    for document in (service, job):
        validate(document)
    machines = 2 if 8 in options else 1
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = container["command"]
    # The program's own words stay what they are; a restart of all machines is so many failed pods.
    assert words[-3:] == ["/app/My_Train.py", "--name", "$$(HOSTNAME)"]
    assert job["spec"]["backoffLimit"] == (6 if machines == 2 else 0)
    assert ("--tee=3" in words) == (machines == 2) and ("--rdzv_conf=join_timeout=60" in words) == (
        machines == 1
    )
    threads = [item["value"] for item in container["env"] if item["name"] == "OMP_NUM_THREADS"]
    assert threads == ([] if machines == 2 else ["4"])
    # A schema that takes anything would prove nothing.
    container["imagee"] = container.pop("image")
    with pytest.raises(Exception, match="imagee"):
        validate(job)


def ready_file(name):
    return list(yaml.safe_load_all((ROOT / f"examples/clusters/{name}.yaml").read_text()))


def contains(whole, part):
    """Whether a document has all that another one has; of a list of dictionaries, in any order and with more."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list) and all(isinstance(item, dict) for item in part):
        return all(any(contains(other, item) for other in whole) for item in part)
    return whole == part


@pytest.mark.parametrize(
    "name, output",
    [("kubernetes", "/runs/train"), ("kubernetes_bucket", "s3://checkpoints/train")],
)
def test_the_manifest_of_the_examples_is_what_the_launcher_writes(tmp_path, validate, name, output):
    options = [
        "--num_processes",
        16,
        "--num_machines",
        2,
        "--max_restarts",
        3,
        "--stop_timeout",
        110,
    ]
    command = [
        *LAUNCH,
        "--engine",
        "kubernetes",
        "--dry_run",
        "--image",
        "registry.example/train:1",
        *options,
    ]
    env = environment(tmp_path / "home")
    del env["ACCELERATE_USE_CPU"], env["OMP_NUM_THREADS"]
    script = ["train.py", "--output", output]
    written = list(
        yaml.safe_load_all(run([*command, "--mixed_precision", "bf16", *script], env, tmp_path))
    )
    (container,) = written[1]["spec"]["template"]["spec"]["containers"]
    container["env"] = [item for item in container["env"] if "DYNAMO" not in item["name"]]
    ready = ready_file(name)
    for document, generated in zip(ready, written, strict=True):
        validate(document)
        assert contains(document, generated)


def test_the_trainjob_of_the_examples_launches_one_machine_of_two(tmp_path):
    """Kubernetes replaces the variables that the runtime of Kubeflow sets."""
    (job,) = ready_file("trainjob")
    trainer = job["spec"]["trainer"]
    set_by_runtime = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "29400",
    }
    words = []
    for word in trainer["command"][2:]:
        for name, text in set_by_runtime.items():
            word = word.replace(f"$(PET_{name})", text)
        words.append(word)
    (tmp_path / "train.py").touch()
    env = environment(tmp_path / "home", **{item["name"]: item["value"] for item in trainer["env"]})
    shown = run([*LAUNCH, "--dry_run", "--cpu", *words], env, tmp_path)
    assert "$(" not in "".join(words) and trainer["numNodes"] == 2
    for expected in (
        "RANK=8",
        "WORLD_SIZE=16",
        "MASTER_ADDR=192.0.2.1",
        "train.py --output=/runs/train",
    ):
        assert expected in shown, shown
