# SPDX-License-Identifier: Apache-2.0
"""What `prepare` has made for one run, in the order in which it was prepared."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..core.errors import PrepareError
from ..optimizer import AcceleratedOptimizer, parameters_of
from ..parallel.placeholders import Placeholder, refuse_placeholder
from ..parallel.prepared import PreparedModel, PreparedOptimizer, added_parameter
from ..scheduler import AcceleratedScheduler


class PreparedModules(MutableSequence[torch.nn.Module]):
    """The modules of prepared models. Scripts take some out, so that a checkpoint does not have them.

    Args:
        prepared: the models of a run. The list changes with this one.
    """

    def __init__(self, prepared: list[PreparedModel]) -> None:
        self._prepared = prepared

    def __len__(self) -> int:
        return len(self._prepared)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [prepared.module for prepared in self._prepared[index]]
        return self._prepared[index].module

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            self._prepared[index] = self._of(value)
        else:
            self._prepared[index] = self._of([value])[0]

    def __delitem__(self, index: Any) -> None:
        del self._prepared[index]

    def insert(self, index: int, value: torch.nn.Module) -> None:
        """Add a module, also one that was not prepared: it is then saved as it is."""
        self._prepared.insert(index, self._of([value])[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Iterable) and list(self) == list(other)

    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _of(self, modules: Iterable[torch.nn.Module]) -> list[PreparedModel]:
        prepared = {id(model.module): model for model in self._prepared}
        return [prepared.get(id(module)) or PreparedModel(module) for module in modules]


@dataclass
class RunObjects:
    """The prepared objects of a run, and the objects that were registered for its checkpoints."""

    models: list[PreparedModel] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)
    averages: list[Any] = field(default_factory=list)

    def prepared_optimizers(self) -> list[PreparedOptimizer]:
        """Each optimizer with the prepared model that it trains, None where no model here is its."""
        prepared = []
        for optimizer in self.optimizers:
            model = self.find_trained(optimizer)
            if model is None:
                prepared.append(PreparedOptimizer(optimizer))
            else:
                prepared.append(model.prepared_optimizer(optimizer))
        return prepared

    def find_trained(self, optimizer: AcceleratedOptimizer) -> PreparedModel | None:
        """The prepared model whose parameters an optimizer steps; None where it is not a prepared model."""
        for model in self.models:
            if model.trains_with(optimizer.optimizer):
                return model
        return None

    def refuse_new_parameters(self, optimizer: AcceleratedOptimizer) -> None:
        """Raise PrepareError for a parameter of an optimizer that a model has only since `prepare`.

        That is, where the model's layout would not average its gradients, and no other prepared model does.
        """
        stepped = {id(parameter) for parameter in parameters_of(optimizer)}
        for model in self.models:
            for name, parameter in model.new_parameters().items():
                if id(parameter) not in stepped:
                    continue
                if not any(_trains(other, parameter) for other in self.models):
                    raise added_parameter(model, name)

    def clear(self) -> None:
        """Forget what was prepared; what was registered stays."""
        self.models.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.dataloaders.clear()
        self.averages.clear()


def _trains(model: PreparedModel, parameter: torch.Tensor) -> bool:
    if any(new is parameter for new in model.new_parameters().values()):
        return False
    return any(trained is parameter for trained in model.module.parameters())


def check_preparable(objects: Sequence[Any]) -> None:
    """Raise PrepareError for containers of what `prepare` takes, and for names alone: both would stay as they are."""
    if all(isinstance(obj, str) for obj in objects):
        names = ", ".join(objects)
        raise PrepareError(f"prepare takes objects, not their names: prepare({names})")
    for obj in objects:
        if isinstance(obj, Placeholder):
            refuse_placeholder(obj)
        items: Iterable[Any] = ()
        if isinstance(obj, dict):
            items = obj.values()
        elif isinstance(obj, (list, tuple, set)):
            items = obj
        names = ", ".join(type(item).__name__ for item in items if isinstance(item, _PREPARABLE))
        if names:
            raise PrepareError(
                f"prepare takes each object as a separate argument, not a {type(obj).__name__} of them ({names}): "
                "prepare(*objects)"
            )


_PREPARABLE = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.utils.data.DataLoader,
    LRScheduler,
    AcceleratedScheduler,
)
