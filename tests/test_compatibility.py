# SPDX-License-Identifier: Apache-2.0
"""What public scripts and libraries use beyond the documented names: import paths, attributes, older spellings."""

import importlib
import inspect
import os
import pickle
import socket
import unittest
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import accelerate
from accelerate import Accelerator
from accelerate.core.errors import ConfigurationError
from accelerate.utils import TorchDynamoPlugin, purge_accelerate_environment, save

API_MODULES = [
    "accelerator", "big_modeling", "checkpointing", "data_loader", "hooks", "inference", "launchers", "local_sgd",
    "optimizer", "scheduler", "state", "tracking", "utils.dataclasses", "utils.fsdp_utils", "utils.imports",
    "utils.launch", "utils.memory", "utils.modeling", "utils.offload", "utils.operations", "utils.other",
    "utils.random",
]  # fmt: skip


@pytest.mark.parametrize("module", API_MODULES)
def test_each_module_of_the_api_gives_every_public_name(module):
    found = importlib.import_module(f"accelerate.{module}")
    for name in (
        "DataLoaderConfiguration",
        "GradientAccumulationPlugin",
        "DistributedType",
        "gather",
        "set_seed",
    ):
        assert getattr(found, name) is getattr(accelerate.utils, name)
    for name in (
        "Accelerator",
        "PartialState",
        "GradientState",
        "AcceleratorState",
        "GeneralTracker",
    ):
        assert getattr(found, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_the_kind'"):
        _ = found.nothing_of_the_kind


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("commands.accelerate_cli", ["main", "launch_command_parser"]),
        (
            "commands.launch",
            ["ComputeEnvironment", "launch_command", "multi_gpu_launcher", "prepare_multi_gpu_env"],
        ),
        ("commands.utils", ["CustomArgumentParser"]),
        (
            "commands.estimate",
            [
                "check_has_model",
                "create_ascii_table",
                "create_empty_model",
                "estimate_command",
                "gather_data",
            ],
        ),
        ("commands.merge", ["merge_command", "merge_command_parser"]),
        ("accelerator", ["load_custom_state", "save_accelerator_state"]),
        ("optimizer", ["move_to_device"]),
        ("test_utils.testing", ["get_backend", "is_cuda_available"]),
        ("utils.bnb", ["get_keys_to_not_convert", "replace_with_bnb_layers"]),
        (
            "utils.imports",
            ["is_numpy_available", "is_torch_distributed_available", "is_tqdm_available"],
        ),
        ("utils.launch", ["env_var_path_add"]),
        (
            "utils.constants",
            ["BETA_TP_AVAILABLE_PYTORCH_VERSION", "FSDP2_PYTORCH_VERSION", "FSDP_MODEL_NAME"],
        ),
        ("utils.constants", ["SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING"]),
        (
            "utils.megatron_lm",
            ["AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "T5TrainStep"],
        ),
        ("utils", ["MegatronLMDummyDataLoader", "MegatronLMDummyScheduler"]),
    ],
)
def test_names_that_scripts_import(module, names):
    found = importlib.import_module(f"accelerate.{module}")
    assert all(callable(getattr(found, name)) or getattr(found, name) for name in names)


def test_scripts_change_what_a_checkpoint_has(tmp_path):
    accelerator = Accelerator(cpu=True)
    trained, frozen = nn.Linear(2, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trained, frozen, optimizer, scheduler = accelerator.prepare(
        trained, frozen, optimizer, scheduler
    )
    assert (
        list(accelerator._models) == accelerator._models == [trained, frozen]
        and len(accelerator._models[:1]) == 1
    )
    assert accelerator._models.pop(-1) is frozen
    accelerator._schedulers = []
    calls = []
    handle = accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: calls.append(len(models))
    )
    assert (
        list(accelerator._save_model_state_pre_hook) == [handle.id]
        and not accelerator._load_model_state_pre_hook
    )
    accelerator.save_state(tmp_path / "c")
    assert calls == [1] and not (tmp_path / "c" / "model_1.safetensors").exists()
    assert accelerator.load_state(tmp_path / "c").step == 0
    accelerator._models = [trained, nn.Linear(1, 1)]
    accelerator._models.append(frozen)
    accelerator.save_state(tmp_path / "d")
    assert (tmp_path / "d" / "model_2.safetensors").exists() and accelerator._models.index(
        frozen
    ) == 2
    assert list(accelerator._get_named_parameters(trained, optimizer)) == ["weight", "bias"]
    (other,) = accelerator._prepare_deepspeed(nn.Linear(1, 1))
    assert other in accelerator._models


def test_the_device_of_a_script_that_runs_on_any():
    from accelerate.test_utils.testing import get_backend

    device, count, allocated = get_backend()
    assert torch.ones(1, device=device).device.type == device and count >= 1 and allocated() >= 0


def test_the_defaults_of_a_loader():
    from accelerate.data_loader import _PYTORCH_DATALOADER_KWARGS as defaults

    names = set(inspect.signature(torch.utils.data.DataLoader.__init__).parameters) - {
        "self",
        "dataset",
    }
    assert names == set(defaults) and torch.utils.data.DataLoader(
        [1], **{**defaults, "prefetch_factor": None}
    )


def test_tools_check_arguments_and_launch(tmp_path, monkeypatch):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    monkeypatch.delenv("ACCELERATE_CONFIG_FILE", raising=False)
    file = tmp_path / "config.yaml"
    file.write_text("mixed_precision: bf16\n")
    parse = launch_command_parser().parse_args
    args, config, determines = _validate_launch_command(parse(["--config_file", str(file), "s.py"]))
    assert (args.training_script, config.mixed_precision, determines) == ("s.py", "bf16", True)
    given = parse(["--config_file", str(file), "--mixed_precision", "no", "s.py"])
    assert _validate_launch_command(given)[2] is False
    file.write_text("mixed_precisions: bf16\n")
    with pytest.raises(ConfigurationError, match="did you mean mixed_precision"):
        _validate_launch_command(parse(["--config_file", str(file), "s.py"]))


def test_prepared_objects_are_marked():
    model, accelerator = nn.Linear(2, 2), Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(torch.zeros(8, 2), batch_size=2)
    prepared = accelerator.prepare(model, optimizer, scheduler, loader)
    assert all(item._is_accelerate_prepared is True for item in prepared)
    assert not hasattr(loader, "_is_accelerate_prepared")


def test_names_of_non_persistent_buffers():
    from accelerate.utils.modeling import get_non_persistent_buffers

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].register_buffer("scratch", torch.zeros(1), persistent=False)
    assert get_non_persistent_buffers(model) == set()
    assert get_non_persistent_buffers(model, recurse=True) == {"scratch"}
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"1.scratch"}


def test_state_dict_entries_of_an_offloaded_module():
    from accelerate import cpu_offload
    from accelerate.utils.modeling import get_state_dict_from_offload

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    cpu_offload(model, execution_device="cpu")
    assert model[0].weight.is_meta
    state = dict.fromkeys(["0.weight", "0.bias", "1.bias"], "")
    returned = get_state_dict_from_offload(model[0], "0.weight", state)
    assert returned is state and state["1.bias"] == ""
    assert torch.equal(state["0.weight"], expected["0.weight"]) and torch.equal(
        state["0.bias"], expected["0.bias"]
    )
    assert model[0].weight.is_meta


def test_a_plugin_of_torch_compile_hands_on_what_was_set():
    assert TorchDynamoPlugin().to_kwargs() == {}
    assert TorchDynamoPlugin(backend="inductor").to_kwargs() == {"backend": "inductor"}


def test_saving_tied_tensors_says_what_is_left_out(tmp_path):
    tensor = torch.ones(3)
    with pytest.warns(UserWarning, match=r"written once.*b \(a\)"):
        save({"a": tensor, "b": tensor}, tmp_path / "tied.safetensors", safe_serialization=True)


def test_a_configuration_file_that_does_not_exist(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    for kind in (FileNotFoundError, ValueError):
        with pytest.raises(kind, match=r"absent\.yaml does not exist"):
            load_config_from_file(str(tmp_path / "absent.yaml"))


def test_purging_covers_inherited_tests_and_not_their_setup(monkeypatch):
    monkeypatch.delenv("ACCELERATE_A", raising=False)

    class Base(unittest.TestCase):
        def setUp(self):
            monkeypatch.setenv("ACCELERATE_A", "setup")

        def test_inherited(self):
            os.environ["ACCELERATE_B"] = "test"

    @purge_accelerate_environment
    class Purged(Base):
        def test_own(self):
            assert os.environ["ACCELERATE_A"] == "setup"
            os.environ["ACCELERATE_B"] = "test"

    class Derived(Purged):
        def test_derived(self):
            self.test_own()
            os.environ["ACCELERATE_B"] = "test"

    for name in ("test_inherited", "test_own", "test_derived"):
        case = Derived(name)
        case.setUp()
        getattr(case, name)()
        assert "ACCELERATE_B" not in os.environ and os.environ["ACCELERATE_A"] == "setup"


def test_names_that_packages_import_from_the_utilities():
    modeling, fsdp = accelerate.utils.modeling, accelerate.utils.fsdp_utils
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4))
    assert modeling.compute_module_total_buffer_size(model) == 2 * 4 * 4 + 8
    assert modeling._get_proper_dtype("torch.float16") is torch.float16
    sizes = {"head": 8, "head.weight": 8, "embedding": 24, "embedding.weight": 8}
    found = modeling.get_module_size_with_ties(
        ["embedding.weight"], 8, sizes, [("embedding", model), ("norm", None)]
    )
    assert found == (24, ["embedding"], [model])
    sizes |= {"norm": 9, "norm.weight": 8}
    tied, modules = ["norm.weight", "embedding.weight"], [("embedding", model), ("norm", None)]
    found = modeling.get_module_size_with_ties(tied, 8, sizes, modules)
    assert found == (25, ["norm", "embedding"], [None, model])
    align = accelerate.big_modeling.attach_align_device_hook_on_blocks
    assert align is accelerate.hooks.attach_align_device_hook_on_blocks
    refuse = accelerate.big_modeling._refuse_recurrent_layers_under_sequence_parallelism
    refuse(model)
    model.config = SimpleNamespace(layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ValueError, match="linear_attention"):
        refuse(model)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
    )
    is_unit = fsdp.fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert [is_unit(module) for module in model] == [True, False]
    assert {"to", "cuda"} <= set(accelerate.hooks._accelerate_added_attributes)

    class Owner:
        shared = accelerate.state.ThreadLocalSharedDict()

    Owner().shared["a"] = 1
    assert Owner().shared == {"a": 1}


def test_unknown_names_name_the_nearest_and_the_version_of_the_api():
    with pytest.raises(
        AttributeError,
        match=r"'gathr_object' .*version 1\.15 .*gather_object",
    ):
        accelerate.utils.gathr_object  # noqa: B018
    assert not hasattr(importlib.import_module("accelerate.state"), "PartialStat")


def test_names_that_are_public_without_documentation():
    accelerator = Accelerator(cpu=True)
    for name in ("ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler"):
        assert getattr(accelerator, name) is None
    assert not (
        accelerator.has_fp8_handler or accelerator.fp8_enabled or accelerator.has_lomo_optimizer
    )
    assert accelerate.utils.GPTTrainStep is accelerate.utils.megatron_lm.GPTTrainStep
    shapes = accelerate.utils.operations.get_shape(
        {"a": torch.ones(2, 3), "b": [torch.ones(())], "c": 3}
    )
    assert shapes == {"a": [2, 3], "b": [[]], "c": 3}

    assert not accelerator.delayed_fp8_autocast and accelerate.state.is_initialized()
    optimizer = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    assert vars(optimizer.accelerator_state) is vars(accelerator.state)
    assert accelerate.state.do_nothing(1, key=2) is None
    with socket.create_server(("", accelerate.utils.other.get_free_port())):
        pass
    accelerator.state._reset_state()
    assert not accelerate.state.is_initialized()


def test_outputs_are_converted_by_an_object_that_is_not_pickled():
    forward = accelerate.utils.operations.ConvertOutputsToFp32(torch.nn.Linear(2, 2).bfloat16())
    assert forward(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.float32
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        pickle.dumps(forward)


def test_adapters_have_the_state_of_a_stateful_loader():
    pytest.importorskip("torchdata")
    adapter = accelerate.data_loader.DataLoaderAdapter
    first, second = (
        adapter(range(6), use_stateful_dataloader=True, batch_size=2) for _ in range(2)
    )
    batches = iter(first.base_dataloader)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second.base_dataloader] == [[2, 3], [4, 5]]
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'state_dict'"):
        adapter(range(6)).state_dict()


def test_steps_of_megatron_models_are_refused():
    from accelerate.utils.megatron_lm import GPTTrainStep

    with pytest.raises(ValueError, match="GPTTrainStep is for a Megatron-LM model class"):
        GPTTrainStep(None, None)
    with pytest.raises(ValueError, match="Megatron-LM arguments"):
        accelerate.utils.add_model_config_to_megatron_parser("gpt2")
