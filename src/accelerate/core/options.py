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
from .errors import ConfigurationError
from .option import ALWAYS, NEVER, SET, Group, Option
from .strategy_options import DEEPSPEED, FP8_OPTIONS, FSDP, MEGATRON, PARALLELISM

PRECISIONS = ("no", "fp16", "bf16", "fp8")
DYNAMO_BACKENDS = tuple(name.lower() for name in DynamoBackend.list())
DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# More processes than that are a typing error.
MOST_PROCESSES = 1 << 20
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
    from .imports import extension_names

    return extension_names("precision")


def _log_level(text: str, where: str) -> None:
    import logging

    if text.upper() not in logging.getLevelNamesMapping():
        known = list(logging.getLevelNamesMapping())
        raise ConfigurationError(
            f"{where}={text!r} is not a logging level: use one of {', '.join(known)}"
        )


def _profiled_steps(text: str, where: str) -> None:
    found = re.fullmatch(r"(\d+):(\d+)(:\d+(,\d+)*)?", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigurationError(
            f"{where}={text!r}: write the first and last step as 10:12, and add ranks, if not "
            "all, as in 10:12:0,3"
        )


PROGRAM = Group(
    "program",
    "What to start, and how.",
    (
        Option(
            "engine",
            "text",
            "How to start the processes: local (this machine), static (several machines with "
            "fixed ranks), elastic (machines that join and leave), mpi (mpirun), deepspeed "
            "(DeepSpeed's launcher), tpu (torch_xla), slurm (a batch job), ray (a Ray cluster) "
            "or kubernetes (writes a manifest, with --dry_run). auto chooses one based on the "
            "other options.",
            "auto",
            ("auto", *LAUNCHERS),
        ),
        Option(
            "config_file",
            "text",
            "Configuration file to read instead of the default file.",
            variable="ACCELERATE_CONFIG_FILE",
            when=NEVER,
            key="",
        ),
        Option(
            "module",
            "switch",
            "Run the script as a module, like 'python -m'.",
            flags=("-m", "--module"),
            key="",
        ),
        Option(
            "no_python",
            "switch",
            "Run the script as an executable program, without 'python'.",
            key="",
        ),
        Option(
            "dry_run",
            "switch",
            "Print the command and the variables of each process without starting them.",
            False,
            key="",
        ),
    ),
    usual=("config_file", "module", "dry_run"),
)

HARDWARE = Group(
    "hardware",
    "Devices to run on. The default is the machine's accelerators, or its CPU if it does not "
    "have any.",
    (
        Option(
            "cpu",
            "switch",
            "Run on the CPU even if the machine has an accelerator.",
            False,
            key="use_cpu",
            variable="ACCELERATE_USE_CPU",
        ),
        Option(
            "multi_gpu",
            "switch",
            "Run on the GPUs of this machine, with one process for each.",
            False,
            key="",
        ),
        Option("tpu", "switch", "Run on TPU cores through torch_xla.", False, key=""),
        Option(
            "gpu_ids",
            "text",
            "Indices of the GPUs to use on this machine, such as '0,2', or 'all'.",
        ),
    ),
    usual=("cpu", "gpu_ids"),
)

PROCESSES = Group(
    "processes",
    "Number of processes, and the processor cores that they use.",
    (
        Option(
            "num_processes",
            "count",
            "Total number of processes on all machines; 'all' starts one for each accelerator.",
            least=1,
            greatest=MOST_PROCESSES,
            variable="ACCELERATE_NUM_PROCESSES",
            when=NEVER,
            flags=("--num_processes", "--num_gpus"),
            question="How many processes in total, on all machines together?",
        ),
        Option(
            "nproc_per_node",
            "count",
            "Number of processes on each machine, as in torchrun. Replaces --num_processes.",
            least=1,
            greatest=MOST_PROCESSES,
            key="",
        ),
        Option(
            "num_cpu_threads_per_process",
            "int",
            "Number of CPU threads of each process (OMP_NUM_THREADS). By default the processes of a machine "
            "share its cores equally.",
            variable="OMP_NUM_THREADS",
            when=NEVER,
        ),
        Option(
            "enable_cpu_affinity",
            "switch",
            "Bind each process to its share of the cores, close to its GPU if it has one.",
            False,
            variable="ACCELERATE_CPU_AFFINITY",
            to_variable=lambda value: "1",
            question="Bind processes to the cores close to their device?",
        ),
    ),
    usual=("num_processes",),
)


def _dynamo(name: str, kind: str, help: str, default: Any = False, **more: Any) -> Option:
    more.setdefault("when", SET)
    variable = f"ACCELERATE_{name.upper()}"
    return Option(name, kind, help, default, key=f"dynamo_config.{name}", variable=variable, **more)


# Programs find out that `accelerate launch` has started them from the variables of these two options, which
# therefore are always set: those of the LeRobot family from ACCELERATE_MIXED_PRECISION, Oumi from the other.
PRECISION = Group(
    "precision",
    "Mixed precision, including 8-bit floats (--mixed_precision fp8).",
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
    "Gradient accumulation, compilation, and the plan and the check of the run.",
    (
        Option(
            "gradient_accumulation_steps",
            "int",
            "Number of batches whose gradients accumulate before each optimizer step.",
            least=1,
            variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            variable_words=("auto",),
        ),
        _dynamo(
            "dynamo_backend",
            "text",
            "Compile the model with torch.compile and this backend.",
            None,
            choices=DYNAMO_BACKENDS,
            # The API's flag spells it so.
            aliases={"torhchxla_trace_once": "torchxla_trace_once"},
            to_variable=lambda value: (value or "no").upper(),
            when=ALWAYS,
            question="Compile the model with torch.compile?",
        ),
        _dynamo("dynamo_mode", "text", "Mode of torch.compile.", "default", choices=DYNAMO_MODES),
        _dynamo(
            "dynamo_use_fullgraph",
            "switch",
            "Raise an error if torch.compile cannot compile the model as one graph.",
        ),
        _dynamo("dynamo_use_dynamic", "switch", "Compile the model for varying shapes."),
        _dynamo(
            "dynamo_use_regional_compilation",
            "switch",
            "Compile each repeated block of the model once instead of the entire model.",
        ),
        Option(
            "plan_file",
            "text",
            "File that `accelerate plan --write` wrote. The run adds its measurements to it.",
            key="plan_file",
            variable="ACCELERATE_PLAN_FILE",
        ),
        Option(
            "certify",
            "int",
            "Before the run, compare this many optimizer steps in the requested layout with the "
            "same steps on one process, as `accelerate certify` does. The run starts only if "
            "they are equal.",
            least=1,
            key="",
        ),
    ),
    usual=("gradient_accumulation_steps",),
)


def _strategy(name: str, help: str, **more: Any) -> Option:
    return Option(
        f"use_{name}",
        "switch",
        help,
        False,
        variable=f"ACCELERATE_USE_{name.upper()}",
        key="",
        **more,
    )


STRATEGY = Group(
    "strategy",
    "How to distribute the model over the processes. Each option has its own topic.",
    (
        _strategy("fsdp", "Shard the model with FSDP."),
        _strategy("deepspeed", "Train with DeepSpeed ZeRO."),
        _strategy("megatron_lm", "Train with Megatron-LM."),
        _strategy(
            "parallelism_config",
            "Combine data, tensor, context, sequence and pipeline parallelism. The options "
            "--parallelism_config_* set the sizes.",
        ),
    ),
    usual=("use_fsdp", "use_deepspeed"),
)

MACHINES = Group(
    "machines",
    "Runs on several machines, and how the machines find each other. Run the same command on "
    "each machine, each with its own --machine_rank.",
    (
        Option(
            "num_machines",
            "int",
            "Number of machines.",
            least=1,
            variable="ACCELERATE_NUM_MACHINES",
            when=NEVER,
            question="How many machines?",
        ),
        Option(
            "nnodes",
            "text",
            "Number of machines, or a range such as 1:4 within which machines can join and "
            "leave. Replaces --num_machines.",
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
            "Host name or IP address of machine 0.",
            question="Address of machine 0",
            flags=("--main_process_ip", "--master_addr"),
        ),
        Option(
            "main_process_port",
            "int",
            "Port on machine 0 to which the processes connect. Default: a free port for one "
            "machine, 29500 for several.",
            least=0,
            greatest=65535,
            question="Port of machine 0",
            flags=("--main_process_port", "--master_port"),
        ),
        Option("same_network", "switch", "The machines are on the same local network.", False),
        Option(
            "rdzv_backend",
            "text",
            "How machines find each other: static (you set the --machine_rank of each) or c10d "
            "(ranks are assigned).",
            "static",
        ),
        Option(
            "rdzv_id",
            "text",
            "Identifier of the run, needed if several runs use the same rendezvous.",
            "none",
        ),
        Option("rdzv_conf", "text", "Additional rendezvous settings: key=value,key=value.", ""),
    ),
    usual=("num_machines", "machine_rank", "main_process_ip"),
)

RESILIENCE = Group(
    "resilience",
    "Restarts, time limits and failure reports.",
    (
        Option(
            "max_restarts",
            "int",
            "How many times to restart all processes after a failure.",
            0,
            least=0,
        ),
        Option(
            "monitor_interval",
            "float",
            "With --engine elastic: seconds between checks of the processes.",
            0.1,
            least=0,
        ),
        Option(
            "stop_timeout",
            "float",
            "Seconds that processes have to exit after SIGTERM before they are killed.",
            4.0,
            least=0,
        ),
        Option(
            "stop_within",
            "float",
            "Seconds after SIGTERM or SIGUSR1 within which a run that calls resume() saves what "
            "it can and exits. Default: no limit, or the end of the Slurm job.",
            least=1,
            variable="ACCELERATE_STOP_WITHIN",
        ),
        Option("error_file", "text", "JSON file to which the first failure of a run is written."),
        Option(
            "hang_report",
            "float",
            "Seconds without progress after which a run reports where each rank is. 0 turns "
            "these reports off. Default: 50.",
            least=0,
            variable="ACCELERATE_HANG_REPORT",
        ),
        Option(
            "collective_timeout",
            "float",
            "Seconds that a collective waits for other ranks before it ends the run with an "
            "error. Default: torch's default.",
            least=1,
            variable="ACCELERATE_COLLECTIVE_TIMEOUT",
        ),
        Option(
            "debug",
            "switch",
            "Check that all ranks make the same collective calls with the same shapes and "
            "dtypes. This is slow; use it for debugging.",
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
            "Print only errors.",
            flags=("--quiet", "-q"),
            key="",
            variable="ACCELERATE_QUIET",
        ),
        Option(
            "tee",
            "text",
            "Streams whose lines are prefixed with the rank on the console: 0 (none), 1 "
            "(standard output), 2 (standard error) or 3 (both), for all ranks or for each rank, "
            "as in '0:3,1:2'.",
            "0",
            flags=("-t", "--tee"),
        ),
        Option("role", "text", "Name of the processes' role in torch's elastic agent.", "default"),
        Option(
            "log_dir",
            "text",
            "Folder for the standard output and standard error of each rank.",
        ),
        Option(
            "progress_interval",
            "float",
            "Seconds between progress lines if the output is not a terminal. 0 turns off these "
            "lines and, on a terminal, the panel. A single process shows its progress only with "
            "this option.",
            60.0,
            least=0,
        ),
        Option(
            "resume",
            "text",
            "Project of the run: a folder, or a location in a bucket such as s3://bucket/run. "
            "The script continues from the newest checkpoint there, if there is one, and saves "
            "there. Replaces the script's project_dir.",
            key="",
            variable="ACCELERATE_RESUME",
        ),
        Option(
            "telemetry",
            "text",
            "Record each step of each process for `accelerate monitor`, in the project folder or "
            "in DIR (--telemetry=DIR).",
            variable="ACCELERATE_TELEMETRY",
            bare="true",
        ),
        Option(
            "profile",
            "text",
            "First and last optimizer step that torch's profiler records: 10:12 on all ranks, "
            "10:12:0,3 on ranks 0 and 3. Each rank writes a trace, such as "
            "profile/rank_00000.json, in the project folder.",
            key="",
            check=_profiled_steps,
            variable="ACCELERATE_PROFILE",
        ),
    ),
    usual=("quiet", "log_dir", "telemetry"),
)

CLUSTERS = Group(
    "clusters",
    "Starting processes with mpirun, Slurm, Ray or Kubernetes.",
    (
        Option(
            "slurm_options",
            "text",
            "Additional sbatch options in one argument: '--partition=gpu --time=2:00:00'.",
            "",
            engine="slurm",
        ),
        Option(
            "ray_address",
            "text",
            "Address of the Ray cluster: host:port, ray://host:port, auto (a cluster that runs "
            "on this machine) or local (a new cluster on this machine). Default: auto if a "
            "cluster runs here, otherwise local.",
            variable="RAY_ADDRESS",
            when=NEVER,
            engine="ray",
        ),
        Option(
            "image",
            "text",
            "Container image of the pods (--engine kubernetes).",
            engine="kubernetes",
        ),
        Option(
            "mpirun_hostfile",
            "text",
            "Host file for mpirun, with one host on each line.",
            key="mpirun_config.mpirun_hostfile",
        ),
    ),
)

TPU = Group(
    "TPU",
    "TPU cores and pods (with --tpu).",
    (
        Option(
            "tpu_use_cluster",
            "switch",
            "Start on all workers of a TPU pod.",
            False,
            flags=("--tpu_cluster",),
            engine="tpu",
        ),
        Option(
            "tpu_use_sudo",
            "switch",
            "Run the commands on the pod's workers with sudo.",
            False,
            engine="tpu",
        ),
        Option(
            "vm",
            "list",
            "Name of a TPU VM. Can be repeated.",
            key="tpu_vm",
            engine="tpu",
        ),
        Option(
            "env",
            "list",
            "Environment variable for the workers of a TPU pod or a Ray cluster, NAME=VALUE. For "
            "Ray, NAME alone passes its value on this machine. Can be repeated.",
            key="tpu_env",
            engine="tpu or ray",
        ),
        Option(
            "main_training_function",
            "text",
            "Name of the script's function that each TPU core runs.",
        ),
        Option(
            "downcast_bf16",
            "switch",
            "Represent float32 as bfloat16 on the TPU.",
            False,
            engine="tpu",
        ),
    ),
)

AWS = Group(
    "AWS",
    "Credentials for runs on Amazon SageMaker.",
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
        "ACCELERATE_CERTIFICATE",
        help="File that `accelerate certify` wrote. Checkpoints of the run store its checksum.",
    ),
    _variable(
        "ACCELERATE_CERTIFY_FILE",
        help="Set by `accelerate certify`: file with the settings of the recording.",
    ),
    _variable(
        "ACCELERATE_CONFIG_DS_FIELDS",
        help="Set by the launcher: keys of `deepspeed_config` in the configuration file.",
    ),
    _variable(
        "ACCELERATE_DEBUG_TIMEOUT",
        "float",
        help="Seconds that a rank waits for the others in debug mode. Default: 20.",
    ),
    _variable(
        "ACCELERATE_DEVICE_PLACEMENT",
        help="Default of `DataLoaderConfiguration(device_placement=...)`. The only value is `lazy`.",
    ),
    _variable(
        "ACCELERATE_DIGEST_STEPS",
        "int",
        least=0,
        help="Number of steps between digests of the parameters in the ledger of a recorded run. "
        "By default, only saves have a digest.",
    ),
    _variable("ACCELERATE_EXACT", "truth", help="Default of `Accelerator(exact=...)`."),
    _variable(
        "ACCELERATE_FP8_OVERRIDE_DGRAD",
        "truth",
        help="`TERecipeKwargs`: compute gradients of inputs in high precision.",
    ),
    _variable(
        "ACCELERATE_FP8_OVERRIDE_FPROP",
        "truth",
        help="`TERecipeKwargs`: compute the forward pass in high precision.",
    ),
    _variable(
        "ACCELERATE_FP8_OVERRIDE_WGRAD",
        "truth",
        help="`TERecipeKwargs`: compute gradients of weights in high precision.",
    ),
    _variable(
        "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING",
        "truth",
        help="`TERecipeKwargs`: one scaling factor for each block (MXFP8).",
    ),
    _variable(
        "ACCELERATE_INIT_INCLUDE_BUFFERS",
        "truth",
        help="Default of `include_buffers` of `init_empty_weights` and `init_on_device`.",
    ),
    _variable(
        "ACCELERATE_LAUNCH_TIME",
        help="Set by the launcher: its start time, for the name of a recorded run.",
    ),
    _variable(
        "ACCELERATE_LOG_LEVEL", help="Default of `get_logger(log_level=...)`.", check=_log_level
    ),
    _variable(
        "ACCELERATE_REPLAY_FILE",
        help="Set by `accelerate replay`: file with the settings of the process.",
    ),
    _variable(
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",
        help="Set in a SageMaker job: the kind of parallelism.",
        choices=tuple(kind.value for kind in SageMakerDistributedType),
    ),
    _variable(
        "ACCELERATE_STATUS_DIR",
        help="Set by the launcher: folder in which each rank writes its progress.",
    ),
    _variable("ACCELERATE_STRATEGY", help="Default of `Accelerator(strategy=...)`."),
    _variable(
        "ACCELERATE_TORCH_DEVICE",
        help="Device of the process, such as `cuda:1`. By default, the accelerator whose index "
        "is the local rank.",
    ),
    _variable(
        "ACCELERATE_TORCH_INTERNALS_OFF",
        help="Rows of [Torch internals](torch_internals.md) to turn off, separated by commas.",
    ),
    _variable(
        "ACCELERATE_NON_FINITE",
        help="Default of `Accelerator(non_finite=...)`: `skip`, `raise` or `ignore`.",
    ),
    _variable(
        "ACCELERATE_TRANSFORMS",
        help="Default of `Accelerator(transforms=...)`: names, separated by commas.",
    ),
    _variable(
        "ACCELERATE_TRAINJOB_EPOCHS",
        "int",
        least=1,
        help="Number of epochs of the run, for the progress that a Kubeflow TrainJob shows. By "
        "default, it shows the progress within each epoch.",
    ),
    _variable("ACCELERATE_USE_SAGEMAKER", "truth", help="Set in a SageMaker job."),
    _variable(
        "FORK_LAUNCHED",
        "truth",
        help="Set in processes that `notebook_launcher` and `debug_launcher` start.",
    ),
    _variable(
        "FSDP_IGNORED_MODULES",
        help="Default of `FullyShardedDataParallelPlugin(ignored_modules=...)`: a regular "
        "expression for module names.",
    ),
)

# Variables of torch's launcher, by which a process knows its rank.
TORCHRUN: tuple[Option, ...] = (
    *(
        _variable(name, "int", least=0)
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    ),
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
    *(
        _variable(name, "int")
        for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    ),
    _variable("SLURM_JOB_END_TIME", "float"),
    *(
        _variable(f"SLURM_{word}", "int")
        for word in ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID")
    ),
    *(
        _variable(f"SLURM_{word}")
        for word in ("JOB_ID", "STEP_ID", "JOB_NODELIST", "STEP_NODELIST")
    ),
    _variable("SLURM_STEP_TASKS_PER_NODE"),
    # torch_xla sets it in the processes that it starts.
    _variable("PJRT_LOCAL_PROCESS_RANK", "int"),
    # torch, devices, Ray and DeepSpeed
    *(_variable(name) for name in (*VISIBLE, "DS_ACCELERATOR", "RAY_TMPDIR")),
    *(
        _variable(name)
        for name in ("MIXED_PRECISION", "GLOO_SOCKET_IFNAME", "LOGLEVEL", "TORCH_CPP_LOG_LEVEL")
    ),
    _variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    _variable("USE_LIBUV"),
    # Kubeflow Trainer sets them in the pods of a TrainJob
    *(_variable(f"KUBEFLOW_TRAINER_SERVER_{word}") for word in ("URL", "CA_CERT", "TOKEN")),
    # Trackers and cloud clients
    *(_variable(f"MLFLOW_{word}") for word in ("EXPERIMENT_NAME", "RUN_ID", "TAGS")),
    _variable("MLFLOW_NESTED_RUN", "truth"),
    *(_variable(name) for name in ("CLEARML_PROJECT", "CLEARML_TASK")),
    *(_variable(f"AWS_{word}") for word in ("PROFILE", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY")),
    # The system, the folder of configuration files, and test runners
    *(
        _variable(name)
        for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", "XDG_CACHE_HOME")
    ),
    *(_variable(name) for name in ("TERM", "NO_COLOR", "FORCE_COLOR")),
    _variable("PYTEST_XDIST_WORKER"),
    _variable("RUN_SLOW", "truth"),
)


@functools.cache
def options() -> Mapping[str, Option]:
    """Every option of a launch by its name."""
    return types.MappingProxyType(
        {option.name: option for group in GROUPS for option in group.options}
    )


@functools.cache
def variables() -> Mapping[str, Option]:
    """Every environment variable that is read, with its row."""
    rows = (*options().values(), *VARIABLES, *TORCHRUN, *FOREIGN)
    return types.MappingProxyType({row.variable: row for row in rows if row.variable})


@functools.cache
def checked_variables() -> tuple[Option, ...]:
    """The variables whose values are checked at the start of each run, with their rows."""
    return tuple(row for row in (*options().values(), *VARIABLES, *TORCHRUN) if row.variable)
