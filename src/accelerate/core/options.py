# SPDX-License-Identifier: Apache-2.0
"""The registry of options: every launch option and every environment variable that is read, one row each.

The parser, the configuration file, the questions of `accelerate config`, the variables of the started processes and
`core.env` come from these rows. It is in `core` because `env`, which everything else reads through, needs it.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping
from typing import Any

from .device_kinds import VISIBLE
from .enums import DynamoBackend, SageMakerDistributedType
from .errors import ConfigurationError, suggestion
from .option import ALWAYS, NEVER, Group, Option
from .strategy_options import DEEPSPEED, FP8_OPTIONS, FSDP, MEGATRON, PARALLELISM

PRECISIONS = ("no", "fp16", "bf16", "fp8")
DYNAMO_BACKENDS = tuple(name.lower() for name in DynamoBackend.list())
DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# Engine -> module and class of its launcher in `accelerate.launchers`, imported only when it is chosen.
LAUNCHERS = {
    "local": ("local", "LocalLauncher"),
    "static": ("static", "StaticLauncher"),
    "elastic": ("elastic", "ElasticLauncher"),
    "mpi": ("mpi", "MpiLauncher"),
    "deepspeed": ("deepspeed", "DeepSpeedLauncher"),
    "tpu": ("tpu", "TpuLauncher"),
    "slurm": ("slurm", "SlurmLauncher"),
    "ray": ("ray", "RayLauncher"),
    "kubernetes": ("kubernetes", "KubernetesLauncher"),
}


def _added_precisions() -> list[str]:
    from . import extensions

    return extensions.names("precision")


def _log_level(text: str, where: str) -> None:
    import logging

    if text.upper() not in logging.getLevelNamesMapping():
        known = list(logging.getLevelNamesMapping())
        raise ConfigurationError(f"{where}={text!r} is not a level of logging: use one of {', '.join(known)}")


def _profiled_steps(text: str, where: str) -> None:
    found = re.fullmatch(r"(\d+):(\d+)(:\d+(,\d+)*)?", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigurationError(
            f"{where}={text!r}: give the first and the last step as 10:12, and ranks, if not all, as 10:12:0,3"
        )


PROGRAM = Group(
    "program",
    "What is started.",
    (
        Option(
            "engine",
            "text",
            "What starts the processes: local (this machine), static (machines of given ranks), elastic (machines "
            "that come and go), mpi, deepspeed (its launcher for host files), tpu, slurm (a batch job), ray (a "
            "running cluster), kubernetes (a manifest, with --dry_run). auto follows from the other options.",
            "auto",
            ("auto", *LAUNCHERS),
        ),
        Option(
            "config_file",
            "text",
            "Configuration file to read instead of the default one.",
            variable="ACCELERATE_CONFIG_FILE",
            when=NEVER,
            key="",
        ),
        Option("module", "switch", "The script is a module, as for 'python -m'.", flags=("-m", "--module"), key=""),
        Option("no_python", "switch", "The script is an executable: do not put 'python' before it.", key=""),
        Option("dry_run", "switch", "Print each process's command and variables, and start nothing.", False, key=""),
    ),
    usual=("config_file", "module", "dry_run"),
)

HARDWARE = Group(
    "hardware",
    "Which devices to run on. The default is the machine's accelerators, or its CPU if it has none.",
    (
        Option(
            "cpu",
            "switch",
            "Run on the CPU even if there is an accelerator.",
            False,
            key="use_cpu",
            variable="ACCELERATE_USE_CPU",
        ),
        Option("multi_gpu", "switch", "Run on several GPUs.", False, key=""),
        Option("tpu", "switch", "Run on TPU cores through torch_xla.", False, key=""),
        Option("gpu_ids", "text", "GPUs of this machine to use, as '0,2', or 'all'."),
    ),
    usual=("cpu", "gpu_ids"),
)

PROCESSES = Group(
    "processes",
    "The number of processes, and what each gets.",
    (
        Option(
            "num_processes",
            "count",
            "Number of processes on all machines together; 'all' is one for each accelerator.",
            least=1,
            variable="ACCELERATE_NUM_PROCESSES",
            when=NEVER,
            flags=("--num_processes", "--num_gpus"),
            question="How many processes in all, on all machines together?",
        ),
        Option(
            "nproc_per_node",
            "count",
            "Instead of --num_processes: the number on each machine, as torchrun has it.",
            least=1,
            key="",
        ),
        Option(
            "num_cpu_threads_per_process",
            "int",
            "CPU threads of each process (OMP_NUM_THREADS). By default the machine's cores are divided equally.",
            variable="OMP_NUM_THREADS",
            when=NEVER,
        ),
        Option(
            "enable_cpu_affinity",
            "switch",
            "Bind each process to its share of the cores, near its GPU if it has one.",
            False,
            variable="ACCELERATE_CPU_AFFINITY",
            to_variable=lambda value: "1",
            question="Bind processes to the cores near their device?",
        ),
        Option(
            "oversubscribe",
            "switch",
            "Start the processes even if this machine's free memory is too small for so many.",
            False,
            variable="ACCELERATE_OVERSUBSCRIBE",
            when=NEVER,
        ),
    ),
    usual=("num_processes",),
)


def _dynamo(name: str, kind: str, help: str, default: Any = False, **more: Any) -> Option:
    variable = f"ACCELERATE_{name.upper()}"
    return Option(name, kind, help, default, key=f"dynamo_config.{name}", variable=variable, when=ALWAYS, **more)


PRECISION = Group(
    "precision",
    "Mixed precision, and 8-bit floats with --mixed_precision fp8.",
    (
        Option(
            "mixed_precision",
            "text",
            "Precision of the forward and backward pass: no (float32), fp16, bf16 or fp8.",
            choices=PRECISIONS,
            extra_choices=_added_precisions,
            variable="ACCELERATE_MIXED_PRECISION",
            when=ALWAYS,
            to_variable=lambda value: value or "no",
            question="Which precision?",
        ),
        *FP8_OPTIONS,
    ),
    usual=("mixed_precision",),
)

TRAINING = Group(
    "training",
    "Gradient accumulation, compilation, and the plan of the run.",
    (
        Option(
            "gradient_accumulation_steps",
            "int",
            "Batches whose gradients accumulate before the optimizer steps.",
            least=1,
            variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            variable_words=("auto",),
        ),
        _dynamo(
            "dynamo_backend",
            "text",
            "Compile the model with torch.compile on this backend.",
            None,
            choices=DYNAMO_BACKENDS,
            # The API's flag spells it so.
            aliases={"torhchxla_trace_once": "torchxla_trace_once"},
            to_variable=lambda value: (value or "no").upper(),
            question="Compile the model with torch.compile?",
        ),
        _dynamo("dynamo_mode", "text", "What torch.compile optimizes for.", "default", choices=DYNAMO_MODES),
        _dynamo("dynamo_use_fullgraph", "switch", "Raise an error for a graph break."),
        _dynamo("dynamo_use_dynamic", "switch", "Trace with dynamic shapes."),
        _dynamo(
            "dynamo_use_regional_compilation", "switch", "Compile each repeated block once, not the entire model."
        ),
        Option(
            "plan_file",
            "text",
            "Estimate that `accelerate plan --write` wrote; the run adds what it measures.",
            key="plan_file",
            variable="ACCELERATE_PLAN_FILE",
        ),
    ),
    usual=("gradient_accumulation_steps",),
)


def _strategy(name: str, help: str, **more: Any) -> Option:
    return Option(f"use_{name}", "switch", help, False, variable=f"ACCELERATE_USE_{name.upper()}", key="", **more)


STRATEGY = Group(
    "strategy",
    "How the model is distributed over the processes; each switch has its own topic.",
    (
        _strategy("fsdp", "Shard with FSDP."),
        _strategy("deepspeed", "Shard with DeepSpeed ZeRO."),
        _strategy("megatron_lm", "Train with Megatron-LM."),
        _strategy(
            "parallelism_config",
            "Distribute by the sizes of data, tensor, context, sequence and pipeline parallelism.",
        ),
    ),
    usual=("use_fsdp", "use_deepspeed"),
)

MACHINES = Group(
    "machines",
    "Several machines, and how they find each other. The launch is repeated on each of them.",
    (
        Option(
            "num_machines",
            "int",
            "Number of machines.",
            least=1,
            variable="ACCELERATE_NUM_MACHINES",
            when=NEVER,
            question="How many machines take part?",
        ),
        Option(
            "nnodes",
            "text",
            "Instead of --num_machines: a number, or a range such as 1:4 within which machines may come and go.",
        ),
        Option(
            "machine_rank",
            "int",
            "Rank of this machine, from 0.",
            least=0,
            variable="ACCELERATE_MACHINE_RANK",
            when=NEVER,
            question="Rank of this machine, from 0?",
            flags=("--machine_rank", "--node_rank"),
        ),
        Option(
            "main_process_ip",
            "text",
            "Address of machine 0.",
            question="Address of machine 0",
            flags=("--main_process_ip", "--master_addr"),
        ),
        Option(
            "main_process_port",
            "int",
            "Port of machine 0 at which the processes connect; on one machine the default is a free one.",
            question="Port of machine 0",
            flags=("--main_process_port", "--master_port"),
        ),
        Option("same_network", "switch", "The machines share a local network.", False),
        Option(
            "rdzv_backend",
            "text",
            "How machines find each other: static (machine ranks are given) or c10d (they are assigned).",
            "static",
        ),
        Option("rdzv_id", "text", "Name of the run, where several share a rendezvous.", "none"),
        Option("rdzv_conf", "text", "Further rendezvous settings as key=value,key=value.", ""),
    ),
    usual=("num_machines", "machine_rank", "main_process_ip"),
)

RESILIENCE = Group(
    "resilience",
    "Failures: restarts, time limits, and what is reported.",
    (
        Option("max_restarts", "int", "How often the processes are restarted after a failure.", 0),
        Option(
            "monitor_interval",
            "float",
            "Seconds between two checks of the processes by the elastic agent.",
            0.1,
        ),
        Option(
            "stop_timeout",
            "float",
            "Seconds that processes have to end after a request to stop, before they are killed.",
            4.0,
        ),
        Option("error_file", "text", "File to which the first failure of a run is written as JSON."),
        Option(
            "hang_report",
            "float",
            "Seconds without progress after which the run reports where each rank is; 60 by default, 0: never.",
            least=0,
            variable="ACCELERATE_HANG_REPORT",
        ),
        Option(
            "collective_timeout",
            "float",
            "Seconds after which a collective that other ranks do not join ends the run with an error.",
            least=1,
            variable="ACCELERATE_COLLECTIVE_TIMEOUT",
        ),
        Option(
            "debug",
            "switch",
            "Compare the operands of each collective between ranks; slower, to find errors.",
            variable="ACCELERATE_DEBUG_MODE",
        ),
    ),
    usual=("max_restarts", "debug"),
)

OUTPUT = Group(
    "output",
    "What a run prints and records.",
    (
        Option(
            "quiet",
            "switch",
            "Print errors only.",
            flags=("--quiet", "-q"),
            key="",
            variable="ACCELERATE_QUIET",
        ),
        Option(
            "tee",
            "text",
            "Mark the lines of these streams with their rank: 1 standard output, 2 standard error, 3 both; or "
            "per rank, as '0:3,1:2'.",
            "0",
            flags=("-t", "--tee"),
        ),
        Option("role", "text", "Name of the processes in logs.", "default"),
        Option("log_dir", "text", "Folder for each rank's standard output and error."),
        Option(
            "progress_interval",
            "float",
            "Seconds between two lines on the progress of a run that writes to no terminal; 0: neither these lines "
            "nor the panel on a terminal. Given for a single process, it is shown for that too.",
            60.0,
        ),
        Option(
            "telemetry",
            "text",
            "Record each step of each process in the run's folder, or with --telemetry=DIR in that one.",
            variable="ACCELERATE_TELEMETRY",
            bare="true",
        ),
        Option(
            "profile",
            "text",
            "Optimizer steps that torch's profiler records, as 10:12, of all ranks, or as 10:12:0,3 of some. Each "
            "writes profile/rank_00000.json in the run's folder.",
            key="",
            check=_profiled_steps,
            variable="ACCELERATE_PROFILE",
        ),
    ),
    usual=("quiet", "log_dir", "telemetry"),
)

CLUSTERS = Group(
    "clusters",
    "Starting through mpirun, Slurm, Ray or Kubernetes.",
    (
        Option(
            "slurm_options",
            "text",
            "Further options of sbatch in one text, as '--partition=gpu --time=2:00:00'.",
            "",
        ),
        Option(
            "ray_address",
            "text",
            "Ray cluster to run on: host:port, ray://host:port, auto (the cluster of this machine) or local (a "
            "new one on this machine). The default is the cluster that runs here, else a new one.",
            variable="RAY_ADDRESS",
            when=NEVER,
        ),
        Option("image", "text", "Container image of the pods."),
        Option(
            "mpirun_hostfile",
            "text",
            "File with one host a line; mpirun starts the processes on them.",
            key="mpirun_config.mpirun_hostfile",
        ),
    ),
)

TPU = Group(
    "TPU",
    "TPU cores and pods; only with --tpu.",
    (
        Option(
            "tpu_use_cluster",
            "switch",
            "Start on all workers of a TPU pod.",
            False,
            flags=("--tpu_cluster",),
        ),
        Option("tpu_use_sudo", "switch", "Use sudo on the pod's workers.", False),
        Option("vm", "list", "A TPU worker's name; may be given several times.", key="tpu_vm"),
        Option("env", "list", "NAME=VALUE for the pod's workers; may be given several times.", key="tpu_env"),
        Option(
            "main_training_function",
            "text",
            "Function of the script that each TPU core runs.",
        ),
        Option("downcast_bf16", "switch", "Store float32 as bfloat16 on the TPU.", False),
    ),
)

AWS = Group(
    "AWS",
    "Credentials, if the configuration is for Amazon SageMaker.",
    (
        Option("aws_access_key_id", "text", "Access key of the account.", key=""),
        Option("aws_secret_access_key", "text", "Secret of the access key.", key=""),
    ),
)

# In the order in which help shows them.
GROUPS: tuple[Group, ...] = (
    PROGRAM,
    HARDWARE,
    PROCESSES,
    MACHINES,
    TRAINING,
    PRECISION,
    STRATEGY,
    PARALLELISM,
    FSDP,
    DEEPSPEED,
    MEGATRON,
    RESILIENCE,
    OUTPUT,
    CLUSTERS,
    TPU,
    AWS,
)


def _variable(name: str, kind: str = "text", **more: Any) -> Option:
    return Option(name, kind, variable=name, when=NEVER, **more)


# Variables of this package that no flag sets.
VARIABLES: tuple[Option, ...] = (
    _variable(
        "ACCELERATE_CONFIG_DS_FIELDS",
        help="Set by the launcher: keys of `deepspeed_config` in the configuration file.",
    ),
    _variable(
        "ACCELERATE_DEBUG_TIMEOUT",
        "float",
        help="Seconds that a rank waits for the others in debug mode. Default: 20.",
    ),
    _variable("ACCELERATE_EXACT", "truth", help="Default of `Accelerator(exact=...)`."),
    _variable(
        "ACCELERATE_FP8_OVERRIDE_DGRAD", "truth", help="TERecipeKwargs: products of input gradients in high precision."
    ),
    _variable(
        "ACCELERATE_FP8_OVERRIDE_FPROP", "truth", help="TERecipeKwargs: products of the forward in high precision."
    ),
    _variable(
        "ACCELERATE_FP8_OVERRIDE_WGRAD",
        "truth",
        help="TERecipeKwargs: products of weight gradients in high precision.",
    ),
    _variable("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", "truth", help="TERecipeKwargs: scale blocks (MXFP8)."),
    _variable(
        "ACCELERATE_INIT_INCLUDE_BUFFERS",
        "truth",
        help="Default of `include_buffers` of `init_empty_weights` and `init_on_device`.",
    ),
    _variable("ACCELERATE_LAUNCH_TIME", help="Set by the launcher: its start, in the name of a recorded run."),
    _variable("ACCELERATE_LOG_LEVEL", help="Level of the loggers of `get_logger`.", check=_log_level),
    _variable(
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",
        help="Set in a SageMaker job: its data parallelism.",
        choices=tuple(kind.value for kind in SageMakerDistributedType),
    ),
    _variable("ACCELERATE_STATUS_DIR", help="Set by the launcher: folder in which each rank publishes its state."),
    _variable("ACCELERATE_STRATEGY", help="Default of `Accelerator(strategy=...)`."),
    _variable("ACCELERATE_TORCH_DEVICE", help="Device of the process, instead of the accelerator of its local rank."),
    _variable("ACCELERATE_TRANSFORMS", help="Default of `Accelerator(transforms=...)`: names, with commas."),
    _variable("ACCELERATE_USE_SAGEMAKER", "truth", help="Set in a SageMaker job."),
    _variable("FORK_LAUNCHED", "truth", help="Set in processes that `notebook_launcher` and `debug_launcher` start."),
    _variable(
        "FSDP_IGNORED_MODULES",
        help="Default of `ignored_modules` of FullyShardedDataParallelPlugin: a regular expression.",
    ),
)

# Variables of torch's launcher, by which a process knows its rank.
TORCHRUN: tuple[Option, ...] = (
    *(_variable(name, "int", least=0) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")),
    *(_variable(name, "int", least=1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")),
    _variable("MASTER_ADDR"),
    _variable("MASTER_PORT", "int", least=0, greatest=65535),
)

# Variables of other programs. They may hold what this package does not know, so they are checked where they are read.
FOREIGN: tuple[Option, ...] = (
    *(_variable(name, "int") for name in ("NNODES", "NODE_RANK")),
    _variable("TORCHELASTIC_USE_AGENT_STORE", "truth"),
    # MPI and Slurm
    *(
        _variable(f"{prefix}_COMM_WORLD_{word}", "int")
        for prefix in ("OMPI", "MV2")
        for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ),
    *(_variable(name, "int") for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    *(_variable(f"SLURM_{word}", "int") for word in ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID")),
    *(_variable(f"SLURM_{word}") for word in ("JOB_ID", "STEP_ID", "JOB_NODELIST", "STEP_NODELIST")),
    _variable("SLURM_STEP_TASKS_PER_NODE"),
    # torch, devices, Ray and DeepSpeed
    *(_variable(name) for name in (*VISIBLE, "RAY_TMPDIR", "DS_ACCELERATOR")),
    *(_variable(name) for name in ("GLOO_SOCKET_IFNAME", "TORCH_CPP_LOG_LEVEL", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")),
    # Trackers and cloud clients
    *(_variable(f"MLFLOW_{word}") for word in ("EXPERIMENT_NAME", "RUN_ID", "TAGS")),
    _variable("MLFLOW_NESTED_RUN", "truth"),
    *(_variable(name) for name in ("CLEARML_PROJECT", "CLEARML_TASK")),
    *(_variable(f"AWS_{word}") for word in ("PROFILE", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY")),
    # The system, the folder of configuration files, and test runners
    *(_variable(name) for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", "XDG_CACHE_HOME")),
    *(_variable(name) for name in ("TERM", "NO_COLOR", "FORCE_COLOR")),
    _variable("PYTEST_XDIST_WORKER"),
    _variable("RUN_SLOW", "truth"),
)


@functools.cache
def options() -> Mapping[str, Option]:
    """Every option of a launch by its name."""
    return types.MappingProxyType({option.name: option for group in GROUPS for option in group.options})


@functools.cache
def variables() -> Mapping[str, Option]:
    """Every environment variable that is read, with its row."""
    rows = (*options().values(), *VARIABLES, *TORCHRUN, *FOREIGN)
    return types.MappingProxyType({row.variable: row for row in rows if row.variable})


@functools.cache
def checked_variables() -> tuple[Option, ...]:
    """The variables whose values are checked at the start of each run, with their rows."""
    return tuple(row for row in (*options().values(), *VARIABLES, *TORCHRUN) if row.variable)


def row_of(variable: str) -> Option:
    """The row of a variable. LookupError for one without a row: a typing error in this package."""
    row = variables().get(variable)
    if row is None:
        meant = suggestion(variable, variables())
        raise LookupError(f"the variable {variable} has no row in core/options.py{meant}")
    return row
