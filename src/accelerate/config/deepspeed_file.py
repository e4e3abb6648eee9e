# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed configuration as a tree of dotted keys; what it may hold, and what of it does nothing."""

from __future__ import annotations

import base64
import binascii
import copy
import os
import warnings
from collections.abc import Mapping
from typing import Any

from ..core import json_text
from ..core.errors import ConfigurationError
from ..core.files import read_regular
from . import checks

_SIZE = 4 << 20  # bytes of a config file


class HfDeepSpeedConfig:
    """A DeepSpeed configuration as a tree of dotted keys, from a dict, a JSON file or base64 text of JSON.

    Raises ValueError for text that is none of these. The dict given is copied, never changed.
    """

    def __init__(self, config_file_or_dict: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        self.config: dict[str, Any] = _read_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the ZeRO stage (-1 where there is none) and whether anything is offloaded."""
        stage = self.get_value("zero_optimization.stage", -1)
        self._stage: Any = stage
        devices = (
            self.get_value(f"zero_optimization.{part}.device") for part in ("offload_optimizer", "offload_param")
        )
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """The dict that holds a dotted key (None where there is none) and the key's last part."""
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            node = node.get(part) if isinstance(node, Mapping) else None
            if node is None:
                return None, last
        return node, last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key, or `default`."""
        node, last = self.find_config_node(ds_key_long)
        return node.get(last, default) if isinstance(node, Mapping) else default

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a dotted key and all below it. With `must_exist`, ValueError where it is not there."""
        node, last = self.find_config_node(ds_key_long)
        if isinstance(node, dict) and last in node:
            del node[last]
        elif must_exist:
            raise ConfigurationError(f"Can't find {ds_key_long} entry in the config: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a key is set and true; False where it is not set."""
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key is set and false; False where it is not set."""
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_zero2(self) -> bool:
        """Whether the ZeRO stage is 2."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether the ZeRO stage is 3."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether parameters or optimizer states are offloaded."""
        return self._offload


def _read_config(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    if isinstance(given, (str, os.PathLike)):
        if os.path.exists(given):
            origin = f"the DeepSpeed config file {os.fspath(given)}"
            try:
                raw = read_regular(given, _SIZE)
            except OSError as error:
                raise ConfigurationError(f"{origin} cannot be read: {error.strerror or error}") from None
            return _parse(raw, origin)
        try:
            return _parse(base64.urlsafe_b64decode(os.fspath(given)), "the base64 DeepSpeed config")
        except (UnicodeDecodeError, AttributeError, ValueError, binascii.Error):
            pass
    raise ConfigurationError(
        "Expected a string path to an existing deepspeed config, or a dictionary, or a base64 encoded string. "
        f"Received: {given}"
    )


def _parse(raw: bytes, origin: str) -> dict[str, Any]:
    try:
        found = json_text.parse(raw)
    except json_text.JSONTextError as error:
        raise ConfigurationError(f"{origin} cannot be used: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{origin} holds a {type(found).__name__}; a JSON object is wanted")
    return found


_HALVES = ("fp16", "bf16")


def check_sections(config: HfDeepSpeedConfig) -> None:
    """Raise ConfigurationError for a section that is no object of options."""
    for section in ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler"):
        value = config.get_value(section)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigurationError(f"the DeepSpeed config has {section}={value!r}: it takes an object of options")


def check_tree(config: HfDeepSpeedConfig) -> None:
    """Raise ConfigurationError for values that no engine can use, before one is made; "auto" is filled later."""
    check_sections(config)
    for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size"):
        if (value := config.get_value(key)) not in (None, "auto"):
            checks.integer(key, value)
    if (value := config.get_value("gradient_clipping")) not in (None, "auto"):
        checks.number("gradient_clipping", value)
    stage = config.get_value("zero_optimization.stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigurationError(f"zero_stage={stage!r}: ZeRO has the stages 0, 1, 2 and 3")
    for kind in _HALVES:
        if (value := config.get_value(f"{kind}.enabled")) not in (None, "auto"):
            checks.truth(f"{kind}.enabled", value)
    if all(config.get_value(f"{kind}.enabled", "auto") in (True, 1) for kind in _HALVES):
        raise ConfigurationError("the DeepSpeed config has fp16.enabled=True and bf16.enabled=True: enable one")
    for name in ("offload_optimizer", "offload_param"):
        _check_offload(config, name, stage)


def _check_offload(config: HfDeepSpeedConfig, name: str, stage: int) -> None:
    section = config.get_value(f"zero_optimization.{name}")
    if section is not None and not isinstance(section, Mapping):
        raise ConfigurationError(f"zero_optimization.{name}={section!r}: it takes an object, {{'device': 'cpu'}}")
    device, path = (config.get_value(f"zero_optimization.{name}.{key}") for key in ("device", "nvme_path"))
    device, path = device or "none", None if path == "none" else path
    if device not in ("none", "cpu", "nvme"):
        raise ConfigurationError(f"{name}_device={device!r}: use none, cpu or nvme")
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError(f"{name}_nvme_path={path!r}: give a folder")
    if device == "nvme" and not path:
        raise ConfigurationError(f"{name}_device='nvme' needs {name}_nvme_path, the folder of the fast disk")
    if path and device != "nvme":
        warnings.warn(
            f"{name}_nvme_path={os.fspath(path)!r} has no effect: {name}_device is {device!r}. Set it to 'nvme', or "
            "leave the path out"
        )
    least = 3 if name == "offload_param" or device == "nvme" else 1
    if device != "none" and stage < least:
        warnings.warn(
            f"{name}_device={device!r} has no effect with zero_stage={stage}: it needs stage {least}. Set it to "
            "'none', or the stage higher"
        )
