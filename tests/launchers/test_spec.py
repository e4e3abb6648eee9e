# SPDX-License-Identifier: Apache-2.0
"""LaunchSpec: what each process gets follows from the settings alone."""

import pytest
import yaml

from accelerate.config.launch_settings import resolve_settings
from accelerate.core.errors import ConfigurationError
from accelerate.core.options import LAUNCHERS, options
from accelerate.launchers import plan as planning
from accelerate.launchers.base import Launcher
from accelerate.launchers.plan import choose, launcher_class, variables, without_effect
from accelerate.launchers.slurm import SlurmLauncher
from accelerate.launchers.spec import LaunchSpec, Program

SCRIPT = Program(__file__, ("--lr", "1"))


@pytest.fixture(autouse=True)
def _four_gpus(monkeypatch):
    """A machine with four GPUs, whatever this one has."""
    monkeypatch.setattr(
        planning.system,
        "accelerators",
        lambda: planning.system.Accelerators("cuda", 4, "CUDA_VISIBLE_DEVICES"),
    )
    for name in ("ACCELERATE_MIXED_PRECISION", "OMP_NUM_THREADS", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)


def test_options_that_an_engine_does_not_use_are_reported():
    launchers = {engine: launcher_class(engine) for engine in LAUNCHERS}
    assert {name for launcher in launchers.values() for name in launcher.unused} <= set(options())
    assert {launcher.name for launcher in launchers.values()} == set(launchers)
    settings = resolve_settings({"role": "worker", "tee": "3", "max_restarts": 0})
    (note,) = without_effect(launchers["slurm"], settings)
    assert note.startswith("role (flag --role), tee (flag --tee): ") and "slurm" in note
    assert without_effect(launchers["elastic"], settings) == []
    settings = resolve_settings({"slurm_options": "--time=1", "image": "train", "vm": ["pod"]})
    of_others = [
        f"--{name}: no effect without --engine {engine}"
        for name, engine in (("image", "kubernetes"), ("vm", "tpu"))
    ]
    assert without_effect(launchers["slurm"], settings) == of_others
    assert without_effect(launchers["local"], settings) == [
        "--slurm_options: no effect without --engine slurm",
        *of_others,
    ]
    settings = resolve_settings({"cpu": True, "gpu_ids": "0,1"})
    (line,) = without_effect(launchers["local"], settings)
    assert "gpu_ids" in line and "--cpu" in line


def test_processes_of_a_machine_have_global_ranks():
    spec = LaunchSpec(
        SCRIPT,
        num_processes=6,
        num_machines=3,
        machine_rank=2,
        main_process_ip="10.0.0.1",
        threads=3,
    )
    process = spec.process(1, port=1234)
    assert process.rank == 5
    told = {name: text for name, text in process.variables.items() if text is not None}
    assert told == {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "OMP_NUM_THREADS": "3",
    }  # fmt: skip
    assert process.argv[-3:] == (__file__, "--lr", "1")


def test_all_accelerators_by_default_and_by_all():
    assert planning.plan(resolve_settings({}), SCRIPT).num_processes == 4
    assert planning.plan(resolve_settings({"num_processes": "all"}), SCRIPT).num_processes == 4
    chosen = planning.plan(resolve_settings({"gpu_ids": "0,2"}), SCRIPT)
    assert chosen.num_processes == 2
    assert chosen.variables["CUDA_VISIBLE_DEVICES"] == "0,2"


def test_cpu_is_one_process_unless_more_are_asked_for():
    assert planning.plan(resolve_settings({"cpu": True}), SCRIPT).num_processes == 1
    spec = planning.plan(resolve_settings({"cpu": True, "num_processes": 2}), SCRIPT)
    assert (spec.device, spec.num_processes, spec.variables["ACCELERATE_USE_CPU"]) == (
        "cpu",
        2,
        "true",
    )
    assert "ACCELERATE_USE_CPU" not in planning.plan(resolve_settings({}), SCRIPT).variables


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"num_processes": 0}, "num_processes=0 is out of range: use 1"),
        ({"num_processes": -1}, "num_processes=-1 is out of range"),
        ({"num_processes": 2, "parallelism_config_tp_size": 3}, "tp_size=3 .* starts 2"),
        ({"num_processes": 5}, "4 cuda devices"),
        ({"gpu_ids": "0,9"}, "device 9 does not exist"),
        ({"cpu": True, "num_processes": "all"}, "--cpu is on"),
        ({"num_machines": 2, "num_processes": 3}, "must be divisible"),
        ({"num_machines": 2, "machine_rank": 2}, "0 to 1"),
        ({"num_cpu_threads_per_process": 0}, "use 1 or more"),
        ({"tee": "7"}, "tee='7'"),
        ({"main_process_port": 70000}, "main_process_port=70000 is out of range: use 0 to 65535"),
    ],
)
def test_what_cannot_be_is_refused(flags, told):
    with pytest.raises(ConfigurationError, match=told):
        planning.plan(resolve_settings(flags), SCRIPT)


def test_missing_programs_are_refused():
    for program in (
        Program("nosuch.py"),
        Program("no_such_module_x", kind="module"),
        Program("no-such-x", kind="program"),
    ):
        with pytest.raises(
            ConfigurationError, match=r"does not exist|is neither in|is not on the PATH"
        ):
            planning.plan(resolve_settings({}), program)


def test_strategies_publish_their_variables_only_when_on():
    assert not any(
        name.startswith(("FSDP_", "MEGATRON", "PARALLELISM"))
        for name in variables(resolve_settings({}))
    )
    fsdp = variables(
        resolve_settings({"use_fsdp": True, "fsdp_transformer_layer_cls_to_wrap": "A,B"})
    )
    assert fsdp["ACCELERATE_USE_FSDP"] == "true"
    assert fsdp["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD"
    assert fsdp["FSDP_OFFLOAD_PARAMS"] == "false"
    assert fsdp["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "A,B"
    assert "FSDP_STATE_DICT_TYPE" not in fsdp
    sizes = variables(
        resolve_settings({"use_parallelism_config": True, "parallelism_config_cp_size": 2})
    )
    assert sizes["PARALLELISM_CONFIG_CP_SIZE"] == "2"
    assert sizes["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] == "allgather"
    assert "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE" not in sizes
    # A size asks for the layout by itself.
    stages = {"parallelism_config_pp_size": 2, "parallelism_config_pp_schedule": "1f1b"}
    staged = variables(resolve_settings(stages))
    assert (
        staged["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
        and staged["PARALLELISM_CONFIG_PP_SIZE"] == "2"
    )
    assert staged["PARALLELISM_CONFIG_PP_SCHEDULE"] == "1f1b"
    assert "PARALLELISM_CONFIG_PP_NUM_MICROBATCHES" not in staged
    assert "ACCELERATE_USE_PARALLELISM_CONFIG" not in variables(
        resolve_settings({"parallelism_config_tp_size": 1})
    )
    deepspeed = variables(
        resolve_settings({"use_deepspeed": True, "zero_stage": 3, "gradient_accumulation_steps": 2})
    )
    assert deepspeed["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert deepspeed["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "2"
    fp8 = variables(
        resolve_settings(
            {"mixed_precision": "fp8", "fp8_override_linear_precision": "true,false,no"}
        )
    )
    assert fp8["ACCELERATE_FP8_OVERRIDE_FPROP"] == "true"
    assert fp8["ACCELERATE_FP8_OVERRIDE_WGRAD"] == "false"
    assert fp8["ACCELERATE_FP8_FORMAT"] == "HYBRID"


def test_only_what_was_set_is_published_and_summarized():
    shown = []
    for flags in (
        {},
        {"dynamo_use_dynamic": False, "gradient_accumulation_steps": 2, "mixed_precision": "bf16"},
    ):
        settings = resolve_settings(flags)
        spec = planning.plan(settings, SCRIPT)
        # By these two, programs find out that they were launched.
        assert {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} <= set(spec.variables)
        shown.append((len(spec.variables), planning.summary(settings, spec)))
    assert spec.variables["ACCELERATE_DYNAMO_USE_DYNAMIC"] == "false"
    assert [count for count, _ in shown] == [2, 4]
    assert (
        "precision" not in shown[0][1]
        and "mixed precision bf16, gradient accumulation steps 2" in shown[1][1]
    )


def test_flags_without_their_switch_are_named():
    flags = {"fsdp_version": 2, "zero_stage": 3, "fp8_backend": "AO"}
    assert without_effect(Launcher, resolve_settings(flags)) == [
        "--fsdp_version: no effect without --use_fsdp",
        "--zero_stage: no effect without --use_deepspeed",
        "--fp8_backend: no effect without --mixed_precision fp8",
    ]
    assert without_effect(Launcher, resolve_settings({"fsdp_version": 2, "use_fsdp": True})) == []
    assert without_effect(Launcher, resolve_settings({})) == []
    assert (
        without_effect(
            launcher_class("deepspeed"), resolve_settings({"deepspeed_hostfile": "hosts"})
        )
        == []
    )


def test_dry_run_shows_every_process(capsys):
    text = Launcher(LaunchSpec(SCRIPT, num_processes=2)).dry_run()
    assert "export RANK=0" in text and "export RANK=1" in text
    assert "export MASTER_PORT=<a free port>" in text
    assert text.count(f"{__file__} --lr 1") == 2


def test_a_kubernetes_manifest_is_whole():
    flags = {
        "engine": "kubernetes",
        "num_processes": 8,
        "num_machines": 2,
        "image": "i:1",
        "mixed_precision": "bf16",
        "stop_within": 90.5,
    }
    settings = resolve_settings(flags)
    launcher = choose(planning.plan(settings, Program("/app/my_train.py", ("--lr", "1"))), settings)
    service, job = yaml.safe_load_all(launcher.dry_run())
    assert service["kind"] == "Service" and service["spec"]["clusterIP"] == "None"
    assert (
        service["spec"]["selector"]
        == {"job-name": job["metadata"]["name"]}
        == {"job-name": "my-train"}
    )
    inner = job["spec"]
    assert (inner["completionMode"], inner["completions"], inner["parallelism"]) == (
        "Indexed",
        2,
        2,
    )
    pod = inner["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["subdomain"] == service["metadata"]["name"] and pod["restartPolicy"] == "Never"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert {"name": "ACCELERATE_MIXED_PRECISION", "value": "bf16"} in container["env"]
    assert {"name": "ACCELERATE_STOP_WITHIN", "value": "90.5"} in container["env"]
    assert pod["terminationGracePeriodSeconds"] > 91
    words = container["command"]
    assert words[words.index("--machine_rank") + 1] == "$(JOB_COMPLETION_INDEX)"
    assert words[words.index("--main_process_ip") + 1] == "my-train-0.my-train"
    assert words[-3:] == ["/app/my_train.py", "--lr", "1"]
    with pytest.raises(ConfigurationError, match="dry_run"):
        launcher.run()
    with pytest.raises(ConfigurationError, match="--num_processes"):
        planning.plan(resolve_settings({"engine": "kubernetes"}), SCRIPT)


def test_a_slurm_script_has_the_sizes(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    flags = {
        "engine": "slurm",
        "num_processes": 4,
        "num_machines": 2,
        "cpu": True,
        "num_cpu_threads_per_process": 3,
    }
    flags["slurm_options"] = "--partition=gpu --time=2:00:00"
    launcher = SlurmLauncher(planning.plan(resolve_settings(flags), SCRIPT))
    launcher.check()
    text = launcher.batch_script()
    for option in (
        "nodes=2",
        "ntasks=4",
        "ntasks-per-node=2",
        "cpus-per-task=3",
        "partition=gpu",
        "time=2:00:00",
    ):
        assert f"\n#SBATCH --{option}\n" in text
    assert (
        "\nexport OMP_NUM_THREADS=3\n" in text
        and " --engine slurm --cpu --num_processes=4 --num_machines=2 " in text
    )
    assert "\n#SBATCH --requeue\n" in text and "\n#SBATCH --signal=TERM@" in text
    assert "Slurm's defaults" not in text
    # One thread of a variable is no wish for one processor, on which the workers of a loader run too.
    spec = launcher.spec._replace(threads=1, slurm_options="", device="cuda", stop_within=300.5)
    text = SlurmLauncher(spec).batch_script()
    assert "\n#SBATCH --signal=TERM@301\n" in text and " --stop_within=300.5 " in text
    assert "#SBATCH --cpus-per-task" not in text and "#SBATCH --gpus-per-node=2" in text
    assert "defaults" in text and "--time and --cpus-per-task" in text
    with pytest.raises(ConfigurationError, match="not an sbatch option"):
        SlurmLauncher(launcher.spec._replace(slurm_options="partition gpu")).check()
