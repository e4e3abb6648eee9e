# SPDX-License-Identifier: Apache-2.0
"""Hooks around a forward: attached, in sequence, removed; weights and inputs brought together; casts."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.placement.align import (
    align_module_device,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)

META = torch.device("meta")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x, scale=1.0):
        return self.linear2(self.batchnorm(self.linear1(x))) * scale


class AddOne(ModelHook):
    def __init__(self, log=None, name=""):
        self.log = [] if log is None else log
        self.name = name

    def init_hook(self, module):
        self.log.append(f"init {self.name}")
        return module

    def pre_forward(self, module, *args, **kwargs):
        self.log.append(f"pre {self.name}")
        return (args[0] + 1, *args[1:]), kwargs

    def post_forward(self, module, output):
        self.log.append(f"post {self.name}")
        return output * 2

    def forward_failed(self, module):
        self.log.append(f"failed {self.name}")

    def detach_hook(self, module):
        self.log.append(f"detach {self.name}")
        return module


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Model().eval()
    model.batchnorm.running_mean.normal_()
    return model


@pytest.fixture
def x():
    return torch.randn(2, 3)


def devices_of(module):
    return {tensor.device for tensor in [*module.parameters(), *module.buffers()]}


def test_a_hook_is_there_and_gone(model, x):
    plain = model(x, scale=3.0)
    before = dict(vars(model))
    signature = inspect.signature(model.forward)
    hook = AddOne()
    assert add_hook_to_module(model, hook) is model
    assert model._hf_hook is hook and model._old_forward.__func__ is Model.forward
    assert model.forward.__name__ == "forward" and inspect.signature(model.forward) == signature
    assert torch.equal(model(x, scale=3.0), 2 * model._old_forward(x + 1, scale=3.0))
    assert remove_hook_from_module(model) is model
    assert vars(model) == before and torch.equal(model(x, scale=3.0), plain)
    assert hook.log == ["init ", "pre ", "post ", "detach "]
    assert remove_hook_from_module(model) is model  # there is none


def test_replaced_or_in_sequence(x):
    log = []
    layer = nn.Linear(3, 3)
    add_hook_to_module(layer, AddOne(log, "a"))
    add_hook_to_module(layer, AddOne(log, "b"))
    layer(x)
    assert log == ["init a", "init b", "pre b", "post b"]
    add_hook_to_module(layer, AddOne(log, "c"), append=True)
    add_hook_to_module(layer, AddOne(log, "d"), append=True)
    assert isinstance(layer._hf_hook, SequentialHook) and [
        hook.name for hook in layer._hf_hook.hooks
    ] == [
        "b",
        "c",
        "d",
    ]
    del log[:]
    assert torch.allclose(layer(x), 8 * layer._old_forward(x + 3))
    assert log == ["pre b", "pre c", "pre d", "post b", "post c", "post d"]
    remove_hook_from_module(layer)
    assert log[6:] == ["detach b", "detach c", "detach d"] and torch.equal(
        layer(x), nn.Linear.forward(layer, x)
    )


def test_remove_recursively(model):
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_module(model)
    assert not hasattr(model, "_hf_hook") and hasattr(model.linear1, "_hf_hook")
    remove_hook_from_submodules(model)
    assert not any(
        hasattr(module, "_hf_hook") or "forward" in vars(module) for module in model.modules()
    )


def test_a_failed_forward_is_told(x):
    log = []
    layer = nn.Linear(3, 3)
    add_hook_to_module(layer, AddOne(log))
    add_hook_to_module(layer, AddOne(log), append=True)
    del log[:]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.zeros(2, 7))
    assert log == ["pre ", "pre ", "failed ", "failed "]


def test_copies_and_pickles_have_hooks_of_their_own(model, x):
    add_hook_to_module(model.linear1, AddOne())
    attach_align_device_hook(model.linear2, "cpu", offload=True)
    wanted = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (
            twin.linear1.forward.args == (twin.linear1,)
            and twin.linear1._hf_hook is not model.linear1._hf_hook
        )
        with torch.no_grad():
            twin.linear1.weight.zero_()
        assert not torch.equal(twin(x), wanted) and torch.equal(model(x), wanted)


def test_align_offloads_and_brings(model, x):
    wanted = model(x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []
    for module in (model.linear1, model.batchnorm, model.linear2):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", offload=True))
        module.register_forward_pre_hook(
            lambda module, args: seen.append((module, devices_of(module)))
        )
    assert all(devices_of(module) == {META} for module in (model.linear1, model.linear2))
    # Buffers stay on the device unless they are said to go too.
    assert (
        model.batchnorm.weight.device == META and model.batchnorm.running_mean.device.type == "cpu"
    )
    add_hook_to_module(model.linear2, ModelHook(), append=True)
    assert torch.equal(model(x), wanted) and len(seen) == 3
    assert devices_of(model.linear1) == {META}
    assert has_offloaded_params(model.linear1) and has_offloaded_params(model.linear2)
    assert not has_offloaded_params(model)
    whole = get_state_dict_offloaded_model(model)
    assert list(whole) == list(state) and all(
        torch.equal(whole[name], value) for name, value in state.items()
    )
    remove_hook_from_submodules(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x), wanted)


def test_align_offloads_buffers_but_for_those_that_no_state_dict_has(model, x):
    model.batchnorm.register_buffer("hidden", torch.zeros(2), persistent=False)
    wanted = model(x)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, weights_map=weights, offload_buffers=True)
    assert (
        model.batchnorm.running_mean.device == META and model.batchnorm.hidden.device.type == "cpu"
    )
    assert torch.equal(model(x), wanted) and model.batchnorm.running_mean.device == META
    hook = model.batchnorm._hf_hook
    assert hook.weights_map.prefix == "batchnorm." and hook.weights_map.dataset is weights
    assert set(hook.original_devices) == {
        *dict(model.batchnorm.named_parameters()),
        *dict(model.batchnorm.named_buffers()),
    }


def test_align_runs_where_there_is_no_memory(model):
    """On the meta device the whole way of inputs and outputs can be seen without an accelerator."""
    hook = AlignDevicesHook(
        execution_device="meta", io_same_device=True, place_submodules=True, skip_keys=[("mask",)]
    )
    seen = {}

    def forward(x, pair, mask=None):
        seen.update(x=x.device, pair=pair["a"].device, mask=mask.device)
        return {"mask": mask}

    model.forward = forward
    add_hook_to_module(model, hook)
    assert devices_of(model) == {META}
    model(torch.ones(2), {"a": torch.ones(2)}, mask=torch.ones(2))
    assert seen == {"x": META, "pair": META, "mask": torch.device("cpu")}
    assert hook.input_device == torch.device("cpu")
    assert repr(hook) == (
        "AlignDevicesHook(execution_device=meta, offload=False, io_same_device=True, offload_buffers=False, "
        "place_submodules=True, skip_keys=[('mask',)])"
    )


def test_preloaded_classes_bring_the_weights_of_all_they_hold(model, x):
    class Direct(Model):
        def forward(self, x):
            return x @ self.linear1.weight.T  # never calls linear1

    torch.manual_seed(0)
    direct = Direct().eval()
    wanted = direct(x)
    attach_align_device_hook(direct, "cpu", offload=True, preload_module_classes=["Direct"])
    assert direct._hf_hook.place_submodules and not hasattr(direct.linear1, "_hf_hook")
    assert devices_of(direct.linear1) == {META} and torch.equal(direct(x), wanted)
    assert devices_of(direct.linear1) == {META}


def test_attach_on_blocks(model, x):
    wanted = model(x)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": "cpu", "linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"},
        offload={"linear1": True, "batchnorm": False, "linear2": True},
        weights_map={name: value.clone() for name, value in model.state_dict().items()},
    )
    assert model._hf_hook.io_same_device and not model._hf_hook.offload
    assert model.linear1._hf_hook.offload and not model.batchnorm._hf_hook.offload
    assert torch.equal(model(x), wanted)
    remove_hook_from_submodules(model)
    # One value for both is for the whole; one for either is for all the names of the other.
    attach_align_device_hook_on_blocks(model, "cpu")
    assert model._hf_hook.place_submodules and hasattr(model.linear1, "_hf_hook")
    remove_hook_from_submodules(model)
    attach_align_device_hook_on_blocks(
        model, "cpu", offload={"linear1": True, "batchnorm": False, "linear2": False}
    )
    assert model.linear1._hf_hook.offload and torch.equal(model(x), wanted)
    remove_hook_from_submodules(model)
    attach_align_device_hook_on_blocks(model, {"linear1": "cpu", "linear2": "meta"}, offload=False)
    assert devices_of(model.linear2) == {META} and not model.linear1._hf_hook.offload


def test_attach_execution_device(model):
    attach_execution_device_hook(model, "cpu")
    assert all(module._hf_hook.execution_device == "cpu" for module in model.modules())
    add_hook_to_module(model.linear1, AlignDevicesHook())
    attach_execution_device_hook(model, "meta")
    assert model.linear1._hf_hook.execution_device is None  # one that is there stays
    remove_hook_from_submodules(model)
    attach_execution_device_hook(nn.Sequential(model), "cpu", preload_module_classes=["Model"])
    assert hasattr(model, "_hf_hook") and not hasattr(model.linear1, "_hf_hook")


def test_align_module_device(model):
    weight = model.linear1.weight
    with align_module_device(model.linear1):
        assert model.linear1.weight is weight
    with align_module_device(model.linear1, "cpu"):
        assert model.linear1.weight is weight
    attach_align_device_hook(model, "cpu", offload=True)
    with align_module_device(model.linear1):
        assert torch.equal(model.linear1.weight, weight)
    with pytest.raises(KeyError), align_module_device(model.linear1, "meta"):
        assert model.linear1.weight.device == META
        raise KeyError
    assert devices_of(model.linear1) == {META} and model.linear1._hf_hook.execution_device == "cpu"


def test_cpu_offload_chain(x):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    moves = []
    for name, module in (("first", first), ("second", second)):
        module.to = lambda device, name=name, module=module: (
            moves.append((name, str(device))) or module
        )
    handle = UserCpuOffloadHook(first, CpuOffload("cpu"))
    add_hook_to_module(first, handle.hook)
    add_hook_to_module(second, CpuOffload("cpu", prev_module_hook=handle))
    assert moves == [("first", "cpu"), ("second", "cpu")]
    del moves[:]
    second(first(x))
    assert moves == [
        ("first", "cpu"),
        ("first", "cpu"),
        ("second", "cpu"),
    ]  # first comes, first goes, second comes
    # A model before it that runs elsewhere need not go.
    second._hf_hook.prev_module_hook.hook.execution_device = "meta"
    del moves[:]
    second(x)
    assert moves == [("second", "cpu")]
    handle.remove()
    assert not hasattr(first, "_hf_hook")


def test_layerwise_casting(x):
    layer = nn.Linear(3, 4)
    wanted = nn.functional.linear(
        x, *(tensor.to(torch.float8_e4m3fn).float() for tensor in (layer.weight, layer.bias))
    )
    add_hook_to_module(
        layer, LayerwiseCastingHook(torch.float8_e4m3fn, torch.float32, non_blocking=False)
    )
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(layer(x), wanted) and layer.weight.dtype == torch.float8_e4m3fn


def test_an_offloaded_model_compiles(model, x):
    wanted = model(x)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": "cpu", "linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"},
        offload={"linear1": False, "batchnorm": False, "linear2": True},
        weights_map={name: value.clone() for name, value in model.state_dict().items()},
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert all(torch.allclose(compiled(x), wanted) for _ in range(3))
    remove_hook_from_submodules(model)
    # Hooks that bring no weights do not break the graph.
    attach_align_device_hook_on_blocks(model, "cpu")
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(model, backend="aot_eager", fullgraph=True)(x), wanted)
