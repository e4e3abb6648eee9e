# SPDX-License-Identifier: Apache-2.0
"""Kubernetes: the manifest of an Indexed Job with one pod for each machine, and of the service that connects them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from ..core.device_kinds import DEVICES
from ..core.errors import ConfigurationError
from .base import Launcher
from .ports import DEFAULT_PORT

# Options that the launches in the pods get, where they differ from their defaults.
INSIDE = (
    "num_processes",
    "num_machines",
    "role",
    "tee",
    "log_dir",
    "error_file",
    "stop_timeout",
    "stop_within",
    "rdzv_conf",
)

# Seconds in which the launch in a pod ends after its ranks.
ENDING = 5


class KubernetesLauncher(Launcher):
    """Writes the manifest that `kubectl apply -f -` starts."""

    name = "kubernetes"
    remote = True
    uses_this_machine = False
    unused: tuple[str, ...] = (
        "monitor_interval",
        "rdzv_id",
        "mpirun_hostfile",
        "machine_rank",
        "main_process_ip",
    )

    def check(self) -> None:
        """Check what this engine requires."""
        if not self.spec.image:
            raise ConfigurationError(
                "the kubernetes engine needs --image, the container image that contains the script"
            )

    def run(self) -> int:
        """Raise ConfigurationError: only --dry_run is supported."""
        raise ConfigurationError(
            "the kubernetes engine only writes a manifest: add --dry_run, and pipe the output to "
            "kubectl apply -f -"
        )

    def dry_run(self) -> str:
        """Return the manifest as YAML."""
        import yaml

        return yaml.safe_dump_all([self.service(), self.job()], sort_keys=False).rstrip()

    @property
    def job_name(self) -> str:
        """The name of the job, made from that of the script."""
        stem = re.sub(r"[^a-z0-9-]+", "-", Path(self.spec.program.name).stem.lower()).strip("-")
        return stem[:50] or "accelerate"

    def service(self) -> dict[str, Any]:
        """A headless service gives each pod of the job a name in DNS."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.job_name},
            # Pods must find one another before they are ready.
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"job-name": self.job_name},
                "ports": [{"name": "rendezvous", "port": self._port}],
            },
        }

    @property
    def _port(self) -> int:
        return self.spec.main_process_port or DEFAULT_PORT

    def job(self) -> dict[str, Any]:
        """Return the Indexed Job, with one pod for each machine."""
        spec = self.spec
        if spec.device in DEVICES:
            resource = DEVICES[spec.device].kubernetes
        else:
            resource = None
        container: dict[str, Any] = {
            "name": "train",
            "image": spec.image,
            "command": self._command(),
            "env": [
                {"name": name, "value": _literal(text)}
                for name, text in sorted(spec.common_variables().items())
                if text is not None
            ],
            "ports": [{"containerPort": self._port}],
        }
        if resource is not None:
            container["resources"] = {"limits": {resource: spec.local_processes}}
        # Shared memory of a pod is 64 MiB by default; the workers of a data loader need more.
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        pod: dict[str, Any] = {
            "subdomain": self.job_name,
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        }
        if spec.stop_within is not None:
            pod["terminationGracePeriodSeconds"] = math.ceil(spec.stop_within) + ENDING
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self.job_name},
            "spec": {
                "completions": spec.num_machines,
                "parallelism": spec.num_machines,
                "completionMode": "Indexed",
                # A failure ends the pods of all machines, and each of them counts.
                "backoffLimit": spec.max_restarts * spec.num_machines,
                "template": {"metadata": {"labels": {"app": self.job_name}}, "spec": pod},
            },
        }

    def _command(self) -> list[str]:
        """`accelerate launch` in each pod: the pod's index is the machine's rank, pod 0 has the address."""
        spec = self.spec
        command = ["accelerate", "launch", *(["--cpu"] if spec.device == "cpu" else [])]
        if spec.num_machines > 1:
            command += ["--machine_rank", "$(JOB_COMPLETION_INDEX)"]
            command += [
                "--main_process_ip",
                f"{self.job_name}-0.{self.job_name}",
                "--main_process_port",
                str(self._port),
            ]
        # The job itself restarts pods.
        return [*command, *map(_literal, spec.launch_arguments(INSIDE))]


def _literal(text: str) -> str:
    """Kubernetes puts a variable's value where a text holds $(NAME), and makes one $ of two."""
    return text.replace("$", "$$")
