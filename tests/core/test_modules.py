# SPDX-License-Identifier: Apache-2.0
"""Questions about torch modules, and compilation by regions."""

from __future__ import annotations

import operator
import weakref

import pytest
import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.core.modules import (
    get_model_tp_size,
    get_module_children_bottom_up,
    get_module_class_from_name,
    model_has_dtensor,
    move_module,
)
from accelerate.parallel.compile import (
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
)
from accelerate.parallel.unwrap import extract_model_from_parallel
from accelerate.torch_internals.compiled import has_compiled_regions, is_compiled_module


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x) * self.scale


def test_children_come_before_their_parents() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    named = get_module_children_bottom_up(model, return_fqns=True)
    assert [name for name, _ in named] == ["0", "1.0", "1.1", "1", ""]
    assert get_module_children_bottom_up(model) == [module for _, module in named]
    assert named[-1][1] is model


def test_class_by_name() -> None:
    assert get_module_class_from_name(Stack(), "Linear") is nn.Linear
    assert get_module_class_from_name(Stack(), "Stack") is Stack
    assert get_module_class_from_name(Stack(), "Conv2d") is None


def test_plain_models_are_neither_compiled_nor_sharded() -> None:
    model = Stack()
    assert (
        not is_compiled_module(model)
        and not has_compiled_regions(model)
        and not model_has_dtensor(model)
    )
    assert get_model_tp_size(model) is None
    model.tp_size = 4
    assert get_model_tp_size(model) == 4


def test_compile_regions_shares_parameters_and_leaves_the_original_alone() -> None:
    model = Stack()
    compiled = compile_regions(model, backend="eager")
    assert all(is_compiled_module(layer) for layer in [*compiled.layers, compiled.head])
    assert (
        has_compiled_regions(compiled)
        and not is_compiled_module(compiled)
        and compiled._orig_mod is model
    )
    assert not has_compiled_regions(model)
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    assert extract_model_from_parallel(compiled) is compiled
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in model.parameters()}
    x = torch.randn(5, 4)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    compiled(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_without_repeated_blocks_is_compiled_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = compile_regions(model, backend="eager")
    assert is_compiled_module(compiled) and not has_compiled_regions(compiled)


def test_regions_compiled_in_place_keep_names_and_values() -> None:
    for compile_in_place in (compile_regions_fsdp2, compile_regions_deepspeed):
        model = Stack()
        names, x = list(model.state_dict()), torch.randn(5, 4)
        wanted = model(x)
        returned = compile_in_place(model, backend="eager")
        assert returned in (model, None) and list(model.state_dict()) == names
        in_place = [
            name for name, module in model.named_modules() if module._compiled_call_impl is not None
        ]
        assert in_place == ["layers.0", "layers.1", "layers.2", "head"] and has_compiled_regions(
            model
        )
        torch.testing.assert_close(model(x), wanted, rtol=0, atol=0)


def test_a_moved_model_has_the_same_parameters():
    """Also where torch would replace them: between the CPU and meta, as between the CPU and `xla` or `npu`."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    former = list(model.parameters())
    assert next(nn.Linear(2, 2).to("meta").parameters()).is_meta
    assert move_module(model, "meta") is model
    assert all(map(operator.is_, model.parameters(), former)) and model[2].weight is model[0].weight
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert [parameter.requires_grad for parameter in former] == [False, True, True, True, True]


def test_a_weak_reference_to_a_parameter_is_named():
    model = nn.Linear(2, 2)
    kept = weakref.ref(model.weight)
    with pytest.raises(
        PrepareError, match=r"Linear .* meta .* weakref .* before creating its optimizer"
    ):
        move_module(model, "meta")
    assert kept() is model.weight


class OwnParameters(nn.Module):
    """Lists its trained part alone, with fewer arguments than torch's method, as published packages do."""

    def __init__(self):
        super().__init__()
        self.policy, self.reference = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.policy(x) - self.reference(x)

    def parameters(self):
        return self.policy.parameters()


def lazy_layers():
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(4))


@pytest.mark.parametrize("make", [OwnParameters, lazy_layers])
def test_unusual_parameters_train_as_in_a_plain_loop(make, tmp_path):
    from accelerate import Accelerator

    x = torch.randn(8, 4)

    def train(model, optimizer, backward):
        for _ in range(3):
            backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    plain = make()
    train(plain, torch.optim.SGD(plain.parameters(), 0.1), torch.Tensor.backward)
    torch.manual_seed(0)
    model = make()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    train(model, optimizer, accelerator.backward)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
