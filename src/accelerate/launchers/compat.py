# SPDX-License-Identifier: Apache-2.0
"""The API's functions that turn parsed arguments into commands and environments."""

from __future__ import annotations

import argparse
from typing import Any

from ..config.launch_settings import Settings, given, resolve_settings
from ..core import env, system
from ..core.errors import ConfigurationError
from ..core.option import as_text
from .deepspeed import python_path, starter_command
from .plan import variables
from .spec import Program


def _settings(args: argparse.Namespace) -> Settings:
    flags = given(args)
    # Tools that merge a configuration file into the arguments set this name of the API's files.
    if getattr(args, "use_cpu", None):
        flags.setdefault("cpu", True)
    return resolve_settings(flags)


def _program(args: argparse.Namespace) -> Program:
    if args.module and args.no_python:
        raise ConfigurationError("--module and --no_python cannot be used together")
    return Program.of(args)


def _command(args: argparse.Namespace) -> list[str]:
    program = _program(args)
    return [part for part in program.argv() if part != "-u" or part in program.args]


def _environment(args: argparse.Namespace, settings: Settings) -> dict[str, str]:
    added: dict[str, Any] = {**variables(settings)}
    if settings["gpu_ids"] not in (None, "", "all"):
        added[system.accelerators().visible or "CUDA_VISIBLE_DEVICES"] = settings["gpu_ids"]
    if settings["num_cpu_threads_per_process"] is not None:
        added["OMP_NUM_THREADS"] = settings["num_cpu_threads_per_process"]
    return env.child_environment(added)


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command and environment for a script that runs as one process, or under mpirun with a host file."""
    settings = _settings(args)
    command = _command(args)
    environment = _environment(args, settings)
    environment["ACCELERATE_USE_CPU"] = as_text(bool(settings["cpu"]))
    if settings["mpirun_hostfile"] is not None:
        from .mpi import mpirun_command

        command = [
            *mpirun_command(int(args.num_processes), settings["mpirun_hostfile"], environment),
            *command,
        ]
    if (args.num_processes or 1) > 1 or (args.num_machines or 1) > 1:
        environment["MASTER_ADDR"] = args.main_process_ip or "127.0.0.1"
        environment["MASTER_PORT"] = str(args.main_process_port or 29500)
    return command, environment


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The environment of several processes; sets the attributes of `args` that torch's launcher reads."""
    settings = _settings(args)
    if getattr(args, "training_script", None) is not None:
        _command(args)
    machines = args.num_machines or 1
    args.nproc_per_node = str(int(args.num_processes) // machines)
    port = args.main_process_port
    if port is None:
        port = 29500
    elif port == 0:
        from .ports import get_free_port

        port = get_free_port()
    if machines > 1:
        args.nnodes, args.node_rank = str(machines), int(args.machine_rank)
        if args.same_network:
            args.master_addr, args.master_port = str(args.main_process_ip), str(port)
        else:
            args.rdzv_endpoint = f"{args.main_process_ip}:{port}"
    else:
        args.master_port = str(port)
    args.main_process_port = port
    return _environment(args, settings)


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """The command of DeepSpeed's launcher (None if torch's launcher is used) and the environment."""
    settings = _settings(args)
    environment = _environment(args, settings)
    only_deepspeed = {
        **given(args),
        "use_deepspeed": True,
        "use_fsdp": False,
        "use_megatron_lm": False,
    }
    added = variables(resolve_settings(only_deepspeed))
    fields = getattr(args, "deepspeed_fields_from_accelerate_config", None)
    if fields is not None:
        added["ACCELERATE_CONFIG_DS_FIELDS"] = str(fields)
    environment.update({name: text for name, text in added.items() if text is not None})
    environment["PYTHONPATH"] = python_path()
    machines = args.num_machines or 1
    if machines == 1 or args.deepspeed_multinode_launcher == "standard":
        prepare_multi_gpu_env(args)
        return None, environment
    local = int(args.num_processes) // machines
    return starter_command(
        args, _program(args), local, args.main_process_ip, args.main_process_port
    ), environment


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Arguments and environment for TPU cores; with `pod`, for starting on all workers of a pod."""
    if args.mixed_precision == "bf16":
        current_env["XLA_DOWNCAST_BF16" if args.downcast_bf16 else "XLA_USE_BF16"] = "1"
    if args.debug:
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm, args.tpu = args.tpu_vm, args.tpu_name
    return args, current_env


def prepare_sagemager_args_inputs(
    sagemaker_config: Any, args: argparse.Namespace
) -> tuple[dict[str, Any], Any]:
    """Return the arguments of SageMaker's estimator and the job's data inputs. The API spells the name this way."""
    from .sagemaker import estimator_arguments

    return estimator_arguments(sagemaker_config, args)
