# SPDX-License-Identifier: Apache-2.0
"""Arguments, variables and defaults become one plan; what cannot be done is refused by name."""

import types

import pytest
import torch

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.config.training import GradientAccumulationPlugin, ProfileKwargs
from accelerate.core.env import patch_environment
from accelerate.core.errors import ConfigurationError
from accelerate.run.resolve import Handlers, _precision
from accelerate.state import AcceleratorState, GradientState, PartialState


def test_origins():
    with patch_environment(
        accelerate_mixed_precision="bf16", accelerate_gradient_accumulation_steps="3"
    ):
        plan = Accelerator().plan
    assert plan.mixed_precision == "bf16"
    assert plan.accumulation.num_steps == 3
    assert plan.origins["mixed_precision"] == "variable ACCELERATE_MIXED_PRECISION"
    assert (
        plan.origins["gradient_accumulation_steps"]
        == "variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    )


def test_a_variable_without_its_prefix_is_named(caplog):
    for variables in ({}, {"accelerate_mixed_precision": "bf16"}):
        with patch_environment(mixed_precision="bf16", **variables):
            Accelerator(cpu=True)
        assert ("set ACCELERATE_MIXED_PRECISION=bf16" in caplog.text) is (not variables)
        caplog.clear()


def test_one_process_has_nothing_to_shard(caplog):
    """Notebooks make an Accelerator with an FSDP plugin, and give its models to other libraries."""
    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Linear(2, 2)
    assert (
        accelerator.prepare(model) is model and accelerator.distributed_type is DistributedType.NO
    )
    assert (
        not hasattr(accelerator.state, "fsdp_plugin")
        and "the FSDP plugin has no effect" in caplog.text
    )


def test_argument_before_variable():
    with patch_environment(
        accelerate_mixed_precision="bf16", accelerate_gradient_accumulation_steps="3"
    ):
        plan = Accelerator(mixed_precision="no", gradient_accumulation_steps=2).plan
    assert (plan.mixed_precision, plan.accumulation.num_steps) == ("no", 2)
    assert plan.origins["mixed_precision"] == "argument"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deepspeed_plugin": 3}, "it takes a DeepSpeedPlugin, not int"),
        ({"deepspeed_plugins": {}}, "deepspeed_plugin={}: it takes a DeepSpeedPlugin, not dict"),
        ({"megatron_lm_plugin": 3}, "it takes a MegatronLMPlugin, not int"),
        ({"mixed_precision": "fp17"}, "mixed_precision='fp17' is unknown"),
        (
            {"parallelism_config": {"tp_size": 2}},
            "parallelism_config={'tp_size': 2}: it takes a ParallelismConfig",
        ),
        (
            {"fsdp_plugin": "fsdp2"},
            "fsdp_plugin='fsdp2': it takes a FullyShardedDataParallelPlugin, not str",
        ),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps=2.5"),
        ({"kwargs_handlers": [3]}, "kwargs_handlers contains 3"),
        ({"device_placement": "bf16"}, "device_placement='bf16' is not a truth value"),
        (
            {"step_scheduler_with_optimizer": 2},
            "step_scheduler_with_optimizer=2: use True or False",
        ),
        ({"split_batches": "some"}, "split_batches='some' is not a truth value"),
        ({"exact": "perhaps"}, "exact='perhaps' is not a truth value"),
        ({"rng_types": ["torhc"]}, "rng_types='torhc' is unknown: use one of torch"),
        ({"kwargs_handlers": [ProfileKwargs(), ProfileKwargs()]}, "two ProfileKwargs"),
        ({"dynamo_backend": "inductr"}, "backend='INDUCTR' is unknown"),
        (
            {
                "gradient_accumulation_steps": 2,
                "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4),
            },
            "both passed",
        ),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(**options)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("accelerate_mixed_precision", "half", "ACCELERATE_MIXED_PRECISION='half' is not one of"),
        ("accelerate_gradient_accumulation_steps", "0", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=0"),
        ("accelerate_gradient_accumulation_steps", "two", "'two' is not an integer"),
        ("accelerate_use_cpu", "perhaps", "ACCELERATE_USE_CPU='perhaps'"),
    ],
)
def test_bad_variables(variable, text, message):
    with patch_environment(**{variable: text}), pytest.raises(ConfigurationError, match=message):
        Accelerator()


def test_missing_main_address():
    with (
        patch_environment(rank="0", world_size="2", local_rank="0"),
        pytest.raises(ConfigurationError, match="MASTER_ADDR and MASTER_PORT are not set"),
    ):
        Accelerator()
    assert not PartialState._shared_state


def test_a_shared_flag_that_scripts_set():
    GradientState().is_xla_gradients_synced = True
    assert GradientState().is_xla_gradients_synced is True


def test_precision_cannot_change():
    Accelerator(mixed_precision="no")
    with pytest.raises(ConfigurationError, match="cannot become 'bf16'"):
        Accelerator(mixed_precision="bf16")


@pytest.mark.parametrize(("origin", "count"), [("argument", 1), ("default", 0)])
def test_the_configuration_of_deepspeed_decides_the_precision(origin, count, caplog):
    state = AcceleratorState(mixed_precision="no")
    plugin = types.SimpleNamespace(deepspeed_config={"bf16": {"enabled": True}})
    state.__dict__.update(deepspeed_plugins=plugin, distributed_type=DistributedType.DEEPSPEED)
    _precision(state, Handlers(), {"mixed_precision": origin}, gathers=False)
    assert len(caplog.records) == count
    assert not count or (
        "mixed_precision='no' (argument)" in caplog.text and "bf16.enabled=True" in caplog.text
    )


def test_device_is_this_machines():
    accelerator = Accelerator()
    expected = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator.device.type == ("cpu" if expected is None else expected.type)


def test_state_without_deepspeed_or_other_ranks():
    accelerator = Accelerator()
    for choose in (
        accelerator.state.select_deepspeed_plugin,
        accelerator.state.get_deepspeed_plugin,
    ):
        with pytest.raises(ConfigurationError, match=r"no DeepSpeed plugin 'a': .*none"):
            choose("a")
    # As in the API, a single process runs what a script leaves to any of several.
    assert accelerator.on_process(lambda: "done", process_index=1)() == "done"
    assert accelerator.on_local_process(lambda: "done", local_process_index=1)() == "done"
