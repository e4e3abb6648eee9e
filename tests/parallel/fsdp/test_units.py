# SPDX-License-Identifier: Apache-2.0
"""What FSDP gathers together, whose parameters an optimizer holds, and what a name is without wrappers."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accelerate.core.errors import PrepareError
from accelerate.parallel import gradients, materialize
from accelerate.parallel.activation import checkpoint_activations
from accelerate.parallel.fsdp.by_hand import (
    ensure_weights_retied,
    fsdp2_canonicalize_names,
    fsdp2_switch_optimizer_parameters,
)
from accelerate.parallel.fsdp.units import (
    find_modules,
    get_parameters_from_modules,
    owning_units,
    select_units,
    units_of_rare_dtypes,
)
from accelerate.parallel.gradients import clip_values, gradients_of
from accelerate.parallel.sharded_optimizer import ParameterPlaces, Replacements
from accelerate.placement.device_map import infer_auto_device_map
from accelerate.placement.sizes import compute_module_sizes
from accelerate.placement.tied import find_tied_parameters


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.outer(self.inner(inputs))


def model_of_blocks():
    return nn.ModuleDict(
        {"head": nn.Linear(4, 4), "body": nn.ModuleList(Block() for _ in range(2))}
    )


def test_units_by_class_are_children_first():
    model = model_of_blocks()
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.Linear}
    )
    units = select_units(model, policy, set())
    first = model["body"][0]
    assert [id(unit) for unit in units[:3]] == [id(model["head"]), id(first.inner), id(first.outer)]
    # Nothing is left for a block whose parts are units.
    assert not any(isinstance(unit, Block) for unit in units)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    assert select_units(model, policy, set()) == list(model["body"])
    assert select_units(model, None, set()) == []


def test_a_tie_keeps_both_ends_in_one_unit():
    model = model_of_blocks()
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model["head"].weight = model["body"][1].inner.weight
    assert select_units(model, policy, set()) == [model["body"][0]]
    # A parameter that is left whole ties nothing.
    assert select_units(model, policy, {model["head"].weight}) == list(model["body"])


def test_units_by_size():
    model = model_of_blocks()
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=25)
    assert select_units(model, policy, set()) == list(model["body"])


def test_modules_by_pattern():
    model = model_of_blocks()
    assert find_modules(model, r"body\.\d\.inner") == [block.inner for block in model["body"]]
    assert get_parameters_from_modules("head", model, "cpu") == set(model["head"].parameters())
    assert (
        find_modules(model, [model["head"]]) == [model["head"]] and find_modules(model, None) == []
    )
    assert find_modules(model, [{"head"}, (r"body\.0",)]) == [model["head"], model["body"][0]]
    assert find_modules(model, model["body"]) == [model["body"]]
    # Those of another model may be in the list too.
    assert find_modules(model, [nn.Linear(1, 1), "foot", model["head"]]) == [model["head"]]


def test_optimizers_follow_their_parameters_through_replacements():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(1, 3)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    found = Replacements()
    for _ in range(2):
        places = ParameterPlaces(model)
        model.weight = nn.Parameter(model.weight.detach().clone())
        found.add(places.replaced())
    found.repoint(optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(model.weight),
        id(model.bias),
    ]
    assert (
        optimizer.state[model.weight]["momentum_buffer"] is momentum and len(optimizer.state) == 2
    )


class ListsItsParameters(nn.Module):
    """Its methods take no arguments, as those of many models for research do."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros(1))

    def parameters(self):
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self):
        yield from nn.Module.named_parameters(self)


def test_a_model_with_its_own_methods_for_parameters():
    model = ListsItsParameters()
    units = select_units(model, functools.partial(size_based_auto_wrap_policy), set())
    assert set(owning_units(model, units)) == {id(parameter) for parameter in model.parameters()}
    assert units_of_rare_dtypes(model, units, set()) == []
    places = ParameterPlaces(model)
    former, model.scale = model.scale, nn.Parameter(torch.zeros(4))
    assert [tuple(map(id, pair)) for pair in places.replaced()] == [(id(former), id(model.scale))]
    names = {"scale", *(f"block.{name}" for name, _ in model.block.named_parameters())}
    assert set(dict(materialize.named_parameters(model))) == names
    assert compute_module_sizes(model)[""] == 4 * (4 + 2 * 20 + 1)
    assert find_tied_parameters(model) == []
    assert set(infer_auto_device_map(model, {"cpu": 10**6}).values()) == {"cpu"}


def test_switch_by_object_and_by_address():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    for key in (lambda parameter: parameter, lambda parameter: parameter.data_ptr()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fsdp2_switch_optimizer_parameters(
            optimizer, {key(model.weight): other.weight, key(model.bias): other.bias}
        )
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
            id(other.weight),
            id(other.bias),
        ]
    with pytest.raises(PrepareError, match="not train anything"):
        fsdp2_switch_optimizer_parameters(
            torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), {other.weight: model.weight}
        )


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_clipping_plain_tensors_is_torchs(norm_type):
    torch.manual_seed(0)
    mine = [
        nn.Parameter(torch.randn(3, 2)),
        nn.Parameter(torch.randn(4)),
        nn.Parameter(torch.zeros(2)),
    ]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in mine]
    for a, b in list(zip(mine, theirs, strict=True))[:2]:
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm = gradients.clip_grad_norm(iter(mine), 0.7, norm_type)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 0.7, norm_type))
    torch.testing.assert_close([p.grad for p in mine[:2]], [p.grad for p in theirs[:2]])
    clip_values(gradients_of(mine), 0.01)
    assert max(p.grad.abs().max() for p in mine[:2]) <= 0.01
    assert gradients.clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0) == 0.0


def test_recomputed_blocks_keep_names_and_ties():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = list(model.state_dict())
    wrappers = checkpoint_activations(model, [model[1]], torch.device("cpu"))
    assert model[1] is wrappers[0] and list(model.state_dict()) == names
    wrapped = dict(model.named_parameters(remove_duplicate=False))
    assert list(fsdp2_canonicalize_names(wrapped)) == names
    with pytest.raises(PrepareError, match="auto_wrap_policy"):
        checkpoint_activations(model, [], torch.device("cpu"))


def test_meta_and_back_keeps_ties():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    materialize.replace_tensors(model, lambda tensor: tensor.to("meta"))
    assert materialize.where_meta(model) == "0.weight" and model[2].running_mean.is_meta
    materialize.allocate(model, torch.device("cpu"))
    assert model[1].weight is model[0].weight and materialize.where_meta(model) is None
    assert isinstance(model[0].weight, nn.Parameter) and not model[2].running_mean.is_meta


def test_init_functions_keep_ties():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    cpu = torch.device("cpu")
    init = ensure_weights_retied(
        lambda module: module.to_empty(device=cpu, recurse=False), model, cpu
    )
    for layer in model:
        init(layer)
    assert model[0].weight is model[1].weight and not model[0].weight.is_meta
    assert model[0].bias is not model[1].bias
    plain = object()
    assert ensure_weights_retied(plain, nn.Linear(1, 1), cpu) is plain
