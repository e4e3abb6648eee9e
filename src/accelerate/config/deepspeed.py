# SPDX-License-Identifier: Apache-2.0
"""Options of a DeepSpeed engine: its configuration, where "auto" values are filled and conflicts are refused."""

from __future__ import annotations

import base64
import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core import env, json_text
from ..core.errors import ConfigurationError
from ..core.imports import is_available
from ..core.messages import warn
from . import checks

if TYPE_CHECKING:
    import torch

_FILE_SIZE = 4 << 20  # bytes of a config file
# Fields of the plugin, and their keys in a file.
_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
# Fields of the plugin, each with its variable and its default.
_VARIABLES: dict[str, tuple[str, Any]] = {
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"),
    "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", "auto"),
    "zero_stage": ("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2),
    "transformer_moe_cls_names": ("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", None),
    "msamp_opt_level": ("ACCELERATE_FP8_OPT_LEVEL", "O1"),
    **{
        name: (f"ACCELERATE_DEEPSPEED_{name.upper()}", "none")
        for name in _KEYS
        if name.startswith("offload_")
    },
}
# What a DeepSpeed file decides: it is a conflict to request it elsewhere too.
_DECIDED_BY_FILE = (*_KEYS, "mixed_precision")


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
            config = json_text.read(text, _FILE_SIZE)
        else:
            config = json_text.parse(base64.urlsafe_b64decode(text))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            "Expected a string path to an existing deepspeed config, or a dictionary, or a base64 encoded string. "
            f"Received: {source} ({error})"
        ) from error
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"the DeepSpeed config {source} contains a {type(config).__name__} instead of a JSON "
            "object"
        )
    return config


def check_stage(config: HfDeepSpeedConfig) -> None:
    """Warn where a device for offloading has no effect at the stage of ZeRO."""
    stage = config.get_value("zero_optimization.stage", 0)
    for name in ("offload_optimizer", "offload_param"):
        device = config.get_value(f"zero_optimization.{name}.device") or "none"
        least = 3 if name == "offload_param" or device == "nvme" else 1
        if device != "none" and stage < least:
            warn(
                f"{name}_device={device!r} has no effect with zero_stage={stage}: it needs stage "
                f"{least}. Set it to 'none', or use a higher stage"
            )


@dataclass
class DeepSpeedPlugin:
    """How a DeepSpeed engine trains the model. A field that is None takes its environment variable or the default.

    `hf_ds_config` (a dict, a file, or the file named by ACCELERATE_DEEPSPEED_CONFIG_FILE) sets the other fields. A
    field that is passed as well fills in what the file omits or leaves "auto", and must otherwise agree with the file.
    `prepare` fills in the remaining "auto" values from the model, the optimizer and the loader (`fill_match`,
    `deepspeed_config_process`). A value that differs from what the program uses is an error. Raises ConfigurationError
    (a ValueError).

    Example:
        plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0)
        accelerator = Accelerator(deepspeed_plugin=plugin)
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    deepspeed_config: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._selected = False
        arguments = {name: getattr(self, name) for name in _KEYS if getattr(self, name) is not None}
        # Whether a configuration was given that does not set the accumulation.
        self.accumulation_by_default: bool = False
        self._read_variables()
        self._check_fields()
        arguments = {name: getattr(self, name) for name in arguments}
        if self.hf_ds_config is None:
            self.hf_ds_config = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
            if self.hf_ds_config == "none":
                self.hf_ds_config = None
        if self.hf_ds_config is None:
            self.hf_ds_config = HfDeepSpeedConfig(self._config_from_fields())
        else:
            self._take_config(self.hf_ds_config, arguments)
        check_stage(self.hf_ds_config)
        # The engine, its user and transformers look at one and the same dict.
        self.deepspeed_config = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = float("inf")
        self.zero3_init_flag = checks.truth_or(
            "zero3_init_flag",
            self.zero3_init_flag,
            "ACCELERATE_DEEPSPEED_ZERO3_INIT",
            self.hf_ds_config.is_zero3(),
        )
        if self.zero3_init_flag and not self.hf_ds_config.is_zero3():
            warn(
                "DeepSpeed Zero3 Init flag is only applicable for ZeRO Stage 3. Setting it to False."
            )
            self.zero3_init_flag = False
        if self.enable_msamp and "msamp" not in self.deepspeed_config:
            self._enable_msamp()

    def _read_variables(self) -> None:
        for name, (variable, default) in _VARIABLES.items():
            setattr(self, name, checks.value_or(getattr(self, name), variable, default))
        if self.enable_msamp is None:
            self.enable_msamp = (env.get("ACCELERATE_FP8_BACKEND") or "").upper() == "MSAMP"

    def _check_fields(self) -> None:
        """What a configuration does not check, because it holds it in another form or not at all."""
        self.zero3_save_16bit_model = checks.truth_or(
            "zero3_save_16bit_model",
            self.zero3_save_16bit_model,
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        )
        for name in ("is_train_batch_min", "enable_msamp"):
            setattr(self, name, checks.truth(name, getattr(self, name)))
        checks.word("msamp_opt_level", self.msamp_opt_level, ("O1", "O2"))

    def _config_from_fields(self) -> dict[str, Any]:
        def offload(device: str | None, path: str | None) -> dict[str, Any]:
            return {"device": device, "nvme_path": None if path == "none" else path}

        return {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "zero_optimization": {
                "stage": self.zero_stage,
                "offload_optimizer": offload(
                    self.offload_optimizer_device, self.offload_optimizer_nvme_path
                ),
                "offload_param": offload(self.offload_param_device, self.offload_param_nvme_path),
                "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
            },
            "gradient_clipping": self.gradient_clipping,
        }

    def _take_config(self, config: Any, given: Mapping[str, Any]) -> None:
        """Let a DeepSpeed configuration decide; `given` are the fields that the user has set in addition."""
        self._refuse_clash()
        # transformers subclasses the config object and keeps its own reference to it.
        if not hasattr(config, "del_config_sub_tree"):
            config = HfDeepSpeedConfig(config)
        self.hf_ds_config = config
        if "zero_optimization" not in config.config:
            raise ConfigurationError(
                "Please specify the ZeRO optimization config in the DeepSpeed config."
            )
        differing = []
        for name, key in _KEYS.items():
            setting = config.get_value(key)
            requested = given.get(name, "auto")
            if setting in (None, "auto") and requested not in ("auto", "none"):
                setting = requested
                _set_value(config.config, key, requested)
            elif requested != "auto" and setting not in (None, "auto", requested):
                differing.append(f"- ds {key}={setting} vs DeepSpeedPlugin {name}={requested}")
            if setting is not None:
                setattr(self, name, setting)
        if differing:
            raise ConfigurationError(
                "the DeepSpeed config and the DeepSpeedPlugin differ: set each value in one of the two\n"
                + "\n".join(differing)
            )
        self.accumulation_by_default = "gradient_accumulation_steps" not in config.config
        config.config.setdefault("gradient_accumulation_steps", 1)
        config.set_stage_and_offload()

    def _refuse_clash(self) -> None:
        requested = (env.get("ACCELERATE_CONFIG_DS_FIELDS") or "").split(",")
        clash = [name for name in requested if name in _DECIDED_BY_FILE]
        if clash:
            raise ConfigurationError(
                f"A DeepSpeed config file decides {', '.join(_DECIDED_BY_FILE)}, but {', '.join(clash)} "
                "is (are) also set in the accelerate config file. Set it in the DeepSpeed file and remove it there "
                "(`accelerate config` has only the needed questions with `deepspeed_config_file`)."
            )

    def _enable_msamp(self) -> None:
        if self.hf_ds_config.is_zero3():
            raise ConfigurationError(
                f"enable_msamp=True with zero_stage={self.zero_stage}: MS-AMP works with the stages 0, 1 and 2"
            )
        self.deepspeed_config["msamp"] = {"enabled": True, "opt_level": self.msamp_opt_level}

    def fill_match(
        self,
        ds_key_long: str,
        mismatches: list[str] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill a key that is "auto" from `kwargs`, or hold what is set against it.

        A difference is added to `mismatches` (both values); a set value is overwritten where `must_match` is False.
        Raises ValueError for an "auto" key that `kwargs` does not have.
        """
        mismatches = [] if mismatches is None else mismatches
        config, key = self.hf_ds_config.find_config_node(ds_key_long)
        if config is None or config.get(key) is None:
            return
        if config[key] == "auto":
            if ds_key_long not in kwargs:
                raise ConfigurationError(
                    f"`{ds_key_long}` not found in kwargs. Please specify `{ds_key_long}` without `auto` (set to "
                    "correct value) in the DeepSpeed config file or pass it in kwargs."
                )
            config[key] = kwargs[ds_key_long]
            return
        if must_match and ds_key_long in kwargs and config[key] != kwargs[ds_key_long]:
            mismatches.append(
                f"- ds {ds_key_long}={config[key]} vs arg {ds_key_long}={kwargs[ds_key_long]}"
            )

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value of a dotted key is "auto"."""
        return bool(self.hf_ds_config.get_value(ds_key_long) == "auto")

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key, or `default` if it is not set."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill every "auto" below `config` (all of it by default) and refuse what differs from `kwargs`.

        Raises ValueError that lists each conflict with both values.
        """
        outermost = mismatches is None
        mismatches = [] if mismatches is None else mismatches
        config = self.deepspeed_config if config is None else config
        for key, value in config.items():
            if isinstance(value, dict):
                self.deepspeed_config_process(
                    f"{prefix}{key}.", mismatches, value, must_match, **kwargs
                )
            else:
                self.fill_match(prefix + key, mismatches, must_match=must_match, **kwargs)
        if outermost and mismatches:
            listed = "\n".join(mismatches)
            raise ConfigurationError(
                "Please correct the following DeepSpeed config values that mismatch kwargs  values:\n"
                f"{listed}\nThe easiest method is to set these DeepSpeed config values to 'auto'."
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write the run's precision into the configuration. ValueError if it has the other half precision."""
        config = self.deepspeed_config
        wanted = "bf16" if mixed_precision == "fp8" else mixed_precision
        halves = ("fp16", "bf16")
        for kind in halves:
            enabled = self.get_value(f"{kind}.enabled")
            if (
                wanted in halves
                and enabled not in (None, "auto")
                and bool(enabled) != (kind == wanted)
            ):
                raise ConfigurationError(
                    f"mixed_precision={mixed_precision!r}, and the DeepSpeed config has {kind}.enabled={enabled}: "
                    "make them agree, or set it to 'auto'"
                )
        if wanted in halves and wanted not in config:
            config[wanted] = {"enabled": True}
            if wanted == "fp16":
                config[wanted]["auto_cast"] = True
        for kind in halves:
            section = config.setdefault(kind, {"enabled": False})
            if section.get("enabled", "auto") == "auto":
                section["enabled"] = kind == wanted

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """A block in which models are built with their parameters partitioned (`enable`, ZeRO-3), or unsharded.

        It overrides `zero3_init_flag`, and its registration with transformers, until its end.
        """
        if enable and not self.hf_ds_config.is_zero3():
            raise ConfigurationError("zero3_init_context_manager(enable=True) is for ZeRO stage 3")
        former = self.zero3_init_flag
        registered = getattr(self, "dschf", None)
        self.zero3_init_flag = enable
        try:
            if enable:
                import deepspeed

                with deepspeed.zero.Init(config_dict_or_path=self._known_so_far()):
                    yield
            else:
                _register_with_transformers(None)
                yield
        finally:
            self.zero3_init_flag = former
            if registered is not None:
                _register_with_transformers(registered)

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are partitioned (ZeRO-3) while they are built."""
        return bool(self.zero3_init_flag)

    def set_deepspeed_weakref(self) -> None:
        """Make transformers load models partitioned (ZeRO-3) while this plugin exists."""
        if not self.zero3_init_flag or not is_available("transformers"):
            return
        from transformers.integrations import HfDeepSpeedConfig as TransformersConfig

        # transformers holds it weakly: it lives as long as the plugin.
        self.dschf: Any = TransformersConfig(self._known_so_far())

    def _known_so_far(self) -> dict[str, Any]:
        """The configuration with numbers for what only `prepare` will know: building partitioned needs them."""
        config = copy.deepcopy(self.deepspeed_config)
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(key, "auto") == "auto":
                config[key] = 1
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        return config

    @property
    def selected(self) -> bool:
        """Whether this plugin is the selected one."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            "'selected' is set through AcceleratorState().select_deepspeed_plugin(name), which unselects the others"
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this the plugin of the models prepared next. Called by `AcceleratorState.select_deepspeed_plugin`."""
        if not _from_accelerator_state:
            raise ConfigurationError(
                "A `DeepSpeedPlugin` is chosen with `AcceleratorState().select_deepspeed_plugin(name)`, which "
                "unselects the others."
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: torch.nn.Module) -> None:
        """Have ZeRO-3 treat each module of the named mixture-of-experts classes as one leaf."""
        if not self.transformer_moe_cls_names:
            return
        from ..core.modules import get_module_class_from_name

        names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        classes = [get_module_class_from_name(model, name) for name in names]
        for name, module_class in zip(names, classes, strict=True):
            if module_class is None:
                raise ConfigurationError(
                    f"Could not find a transformer layer class called '{name}' in the model."
                )
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, classes)


def _set_value(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, whose sections are made where they are missing."""
    *path, last = key.split(".")
    for part in path:
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def _register_with_transformers(config: Any) -> None:
    """Have transformers build and load models under a configuration (partitioned by ZeRO-3), or under none."""
    if is_available("transformers"):
        from transformers.integrations import deepspeed as integration

        if config is None:
            integration.unset_hf_deepspeed_config()
        else:
            integration.set_hf_deepspeed_config(config)


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """The selected plugin of an AcceleratorState. Raises ValueError where no DeepSpeed plugin is in use."""
    plugins = getattr(state, "deepspeed_plugins", None)
    if isinstance(plugins, Mapping):
        candidates = list(plugins.values())
    else:
        candidates = [plugins]
    for plugin in candidates:
        if isinstance(plugin, DeepSpeedPlugin) and (len(candidates) == 1 or plugin.selected):
            return plugin
    raise ConfigurationError(
        "Couldn't retrieve the active `DeepSpeedPlugin` as none were enabled. Pass `deepspeed_plugins` to "
        "`Accelerator` before calling this function."
    )
