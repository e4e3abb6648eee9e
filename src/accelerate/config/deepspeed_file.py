# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed configuration as a tree of dotted keys; what it may hold, and what of it does nothing."""

from __future__ import annotations

import base64
import copy
import os
from collections.abc import Mapping
from typing import Any

from ..core import json_text
from ..core.errors import ConfigurationError
from ..core.messages import warn

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
            self.get_value(f"zero_optimization.{part}.device")
            for part in ("offload_optimizer", "offload_param")
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
        if isinstance(node, Mapping):
            return node.get(last, default)
        return default

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


def _read_config(source: Any) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    try:
        text = os.fspath(source)
        if os.path.exists(text):
            config = json_text.read(text, _SIZE)
        else:
            config = json_text.parse(base64.urlsafe_b64decode(text))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            "Expected a string path to an existing deepspeed config, or a dictionary, or a base64 encoded string. "
            f"Received: {source} ({error})"
        ) from error
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"the DeepSpeed config {source} holds a {type(config).__name__}, not a JSON object"
        )
    return config


def check_stage(config: HfDeepSpeedConfig) -> None:
    """Refuse an unknown stage of ZeRO, and warn where a device for offloading has no effect at the stage."""
    stage = config.get_value("zero_optimization.stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigurationError(f"zero_stage={stage!r}: ZeRO has the stages 0, 1, 2 and 3")
    for name in ("offload_optimizer", "offload_param"):
        device = config.get_value(f"zero_optimization.{name}.device") or "none"
        least = 3 if name == "offload_param" or device == "nvme" else 1
        if device != "none" and stage < least:
            warn(
                f"{name}_device={device!r} has no effect with zero_stage={stage}: it needs stage {least}. Set it to "
                "'none', or the stage higher"
            )
