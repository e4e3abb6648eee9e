# SPDX-License-Identifier: Apache-2.0
"""Every option of a launch, one row each: its flag, type, default, place in a configuration file and variable."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..core.enums import DynamoBackend
from .launch_option import Group, Option
from .launch_strategies import DEEPSPEED, FP8, FSDP, MEGATRON, PARALLELISM

PRECISIONS = ("no", "fp16", "bf16", "fp8")
# The word list of the API's flag; "torhchxla_trace_once" is the API's own spelling, kept beside the right one.
DYNAMO_BACKENDS = tuple(
    name.lower().replace("torchxla_trace_once", "torhchxla_trace_once")
    if name == "TORCHXLA_TRACE_ONCE"
    else name.lower()
    for name in DynamoBackend.list()
    if name not in ("HPU_BACKEND", "NEURON")
)

HARDWARE = Group(
    "hardware",
    "Which devices to run on. Without one of these the machine's accelerators are used, or the CPU where it has none.",
    (
        Option("cpu", "switch", "Run on the CPU, also where there is an accelerator.", False, key="use_cpu"),
        Option("multi_gpu", "switch", "Run on several GPUs.", False),
        Option("tpu", "switch", "Run on TPU cores through torch_xla.", False),
        Option("gpu_ids", "text", "Which GPUs of this machine to use, as '0,2', or 'all'.", key="gpu_ids"),
    ),
)

RESOURCES = Group(
    "resources",
    "How many processes, and what each gets.",
    (
        Option(
            "num_processes",
            "count",
            "How many processes to start in all, on all machines together; 'all' is one for each accelerator.",
            key="num_processes",
            flags=("--num_processes", "--num-processes", "--num_gpus", "--num-gpus"),
        ),
        Option("num_machines", "int", "How many machines take part.", key="num_machines"),
        Option(
            "nnodes",
            "text",
            "Instead of --num_machines: a number of machines, or a range as 1:4 within which they may come and go.",
            key="nnodes",
        ),
        Option(
            "num_cpu_threads_per_process",
            "int",
            "CPU threads of each process (OMP_NUM_THREADS). By default the machine's cores are shared out.",
            key="num_cpu_threads_per_process",
            variable="OMP_NUM_THREADS",
        ),
        Option(
            "enable_cpu_affinity",
            "switch",
            "Bind each process to its share of the cores, near its GPU where it has one.",
            False,
            key="enable_cpu_affinity",
            variable="ACCELERATE_CPU_AFFINITY",
        ),
        Option(
            "oversubscribe",
            "switch",
            "Start the processes although this machine's free memory is too small for so many.",
            False,
            key="oversubscribe",
            variable="ACCELERATE_OVERSUBSCRIBE",
        ),
    ),
)

TRAINING = Group(
    "training",
    "Defaults that the script's Accelerator takes over.",
    (
        Option(
            "mixed_precision",
            "text",
            "Numbers of the forward and backward pass: no (float32), fp16, bf16 or fp8.",
            choices=PRECISIONS,
            key="mixed_precision",
            variable="ACCELERATE_MIXED_PRECISION",
        ),
        Option(
            "gradient_accumulation_steps",
            "int",
            "Batches whose gradients add up before the optimizer steps.",
            key="gradient_accumulation_steps",
            variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        ),
        Option(
            "dynamo_backend",
            "text",
            "Compile the model with torch.compile on this backend.",
            choices=DYNAMO_BACKENDS,
            key="dynamo_config.dynamo_backend",
            variable="ACCELERATE_DYNAMO_BACKEND",
        ),
        Option(
            "dynamo_mode",
            "text",
            "What torch.compile optimises for.",
            "default",
            choices=("default", "reduce-overhead", "max-autotune"),
            key="dynamo_config.dynamo_mode",
            variable="ACCELERATE_DYNAMO_MODE",
        ),
        Option(
            "dynamo_use_fullgraph",
            "switch",
            "Refuse graph breaks.",
            False,
            key="dynamo_config.dynamo_use_fullgraph",
            variable="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        ),
        Option(
            "dynamo_use_dynamic",
            "switch",
            "Trace with dynamic shapes.",
            False,
            key="dynamo_config.dynamo_use_dynamic",
            variable="ACCELERATE_DYNAMO_USE_DYNAMIC",
        ),
        Option(
            "dynamo_use_regional_compilation",
            "switch",
            "Compile one repeated block instead of the whole model.",
            False,
            key="dynamo_config.dynamo_use_regional_compilation",
            variable="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        ),
        Option(
            "debug",
            "switch",
            "Check every collective operation's operands across ranks; slower, for finding mistakes.",
            key="debug",
            variable="ACCELERATE_DEBUG_MODE",
        ),
    ),
)

STRATEGY = Group(
    "strategy",
    "How the model is laid out over the processes; each switch brings in its own options below.",
    (
        Option("use_fsdp", "switch", "Shard with FSDP.", False, variable="ACCELERATE_USE_FSDP", when="use_fsdp"),
        Option(
            "use_deepspeed",
            "switch",
            "Shard with DeepSpeed ZeRO.",
            False,
            variable="ACCELERATE_USE_DEEPSPEED",
            when="use_deepspeed",
        ),
        Option(
            "use_megatron_lm",
            "switch",
            "Train with Megatron-LM.",
            False,
            variable="ACCELERATE_USE_MEGATRON_LM",
            when="use_megatron_lm",
        ),
        Option(
            "use_parallelism_config",
            "switch",
            "Lay out data, tensor, context and sequence parallelism by sizes.",
            False,
            variable="ACCELERATE_USE_PARALLELISM_CONFIG",
            when="use_parallelism_config",
        ),
    ),
)

MACHINES = Group(
    "machines",
    "Several machines, restarts and logs.",
    (
        Option("machine_rank", "int", "Which of the machines this one is, from 0.", key="machine_rank"),
        Option("main_process_ip", "text", "Address of machine 0.", key="main_process_ip"),
        Option(
            "main_process_port",
            "int",
            "Port of machine 0 that the processes meet at; on one machine a free one is chosen.",
            key="main_process_port",
        ),
        Option("same_network", "switch", "The machines share a local network.", False, key="same_network"),
        Option(
            "rdzv_backend",
            "text",
            "How machines find one another: static (machine ranks are given) or c10d (they are handed out).",
            "static",
            key="rdzv_backend",
        ),
        Option("rdzv_id", "text", "Name of the run among those that share a rendezvous.", "none", key="rdzv_id"),
        Option("rdzv_conf", "text", "Further rendezvous settings as key=value,key=value.", "", key="rdzv_conf"),
        Option(
            "max_restarts",
            "int",
            "How often a failed group of processes is started again.",
            0,
            key="max_restarts",
        ),
        Option(
            "monitor_interval",
            "float",
            "Seconds between two looks of the elastic agent at its processes.",
            0.1,
            key="monitor_interval",
        ),
        Option("role", "text", "Name of the processes in logs.", "default", key="role"),
        Option(
            "tee",
            "text",
            "Mark the lines of these streams with their rank: 1 standard output, 2 standard error, 3 both; or "
            "per rank, as '0:3,1:2'.",
            "0",
            flags=("-t", "--tee"),
            key="tee",
        ),
        Option("log_dir", "text", "Folder that keeps each rank's standard output and error.", key="log_dir"),
        Option("error_file", "text", "File that gets the first failure of a run as JSON.", key="error_file"),
        Option(
            "stop_timeout",
            "float",
            "Seconds that processes get to end by themselves when they are asked to stop, before they are killed.",
            4.0,
            key="stop_timeout",
        ),
    ),
)

PROGRAM = Group(
    "program",
    "What is started.",
    (
        Option(
            "engine",
            "text",
            "What starts the processes: local (this machine), static (machines of given ranks), elastic (machines "
            "that come and go), mpi, deepspeed (its starter for host files), tpu, slurm (a batch job), ray (a running "
            "cluster), kubernetes (a manifest, with --dry_run). auto takes what the options imply.",
            "auto",
            choices=("auto", "local", "static", "elastic", "mpi", "deepspeed", "tpu", "slurm", "ray", "kubernetes"),
            key="engine",
        ),
        Option("config_file", "text", "Configuration file to read, instead of the default one."),
        Option("module", "switch", "The script is a module, as for 'python -m'.", flags=("-m", "--module")),
        Option("no_python", "switch", "The script is a program of its own: do not put 'python' before it."),
        Option("dry_run", "switch", "Print each process's command and variables, and start nothing.", False),
        Option("quiet", "switch", "Only errors are printed by the launcher.", flags=("--quiet", "-q")),
    ),
)

TPU = Group(
    "TPU",
    "Only with --tpu.",
    (
        Option(
            "tpu_use_cluster",
            "switch",
            "Start on all workers of a TPU pod.",
            False,
            key="tpu_use_cluster",
            flags=("--tpu_cluster", "--tpu-cluster"),
        ),
        Option("tpu_use_sudo", "switch", "Use sudo on the pod's workers.", False, key="tpu_use_sudo"),
        Option("vm", "list", "A TPU worker's name; may be given several times.", key="tpu_vm"),
        Option("env", "list", "NAME=VALUE for the pod's workers; may be given several times.", key="tpu_env"),
        Option(
            "main_training_function",
            "text",
            "Function of the script that each TPU core runs.",
            key="main_training_function",
        ),
        Option(
            "downcast_bf16",
            "switch",
            "Hold float32 as bfloat16 on the TPU.",
            False,
            key="downcast_bf16",
        ),
    ),
)

AWS = Group(
    "AWS",
    "Only where the configuration is for Amazon SageMaker.",
    (
        Option("aws_access_key_id", "text", "Access key of the account."),
        Option("aws_secret_access_key", "text", "Secret of the access key."),
    ),
)

MPI = Group(
    "clusters",
    "Starting through mpirun, Slurm, Ray or Kubernetes.",
    (
        Option(
            "slurm_options",
            "text",
            "Further options of sbatch in one text, as '--partition=gpu --time=2:00:00'.",
            "",
            key="slurm_options",
        ),
        Option(
            "ray_address",
            "text",
            "Ray cluster to run on: host:port, ray://host:port, auto (the one that runs on this machine) or local (a "
            "new one of this machine alone). Without it: the one that runs here, else a new one.",
            key="ray_address",
            variable="RAY_ADDRESS",
        ),
        Option("image", "text", "Container image of the pods.", key="image"),
        Option(
            "mpirun_hostfile",
            "text",
            "File with one host a line; the processes are started on them by mpirun.",
            key="mpirun_config.mpirun_hostfile",
        ),
    ),
)


# In the order in which help shows them.
GROUPS: tuple[Group, ...] = (
    PROGRAM,
    HARDWARE,
    RESOURCES,
    TRAINING,
    STRATEGY,
    MACHINES,
    FSDP,
    DEEPSPEED,
    MEGATRON,
    PARALLELISM,
    FP8,
    MPI,
    TPU,
    AWS,
)


@functools.cache
def options() -> dict[str, Option]:
    """Every option by its name."""
    return {option.name: option for group in GROUPS for option in group.options}


def published_when(switch: str) -> Iterator[Option]:
    """The options whose variables are set when `switch` is on."""
    return (option for option in options().values() if option.when == switch and option.variable)
