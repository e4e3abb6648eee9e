# SPDX-License-Identifier: Apache-2.0
"""The API's functions for Megatron-LM, implemented by this library's own layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def prepare_data_loader(accelerator: Any, dataloader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, prepared for the layout of the run: ranks that share one model replica read the same samples.

    Megatron-LM needs a special loader for that; `accelerator.prepare` does it with any loader.
    """
    prepared: DataLoader[Any] = accelerator.prepare_data_loader(dataloader)
    return prepared


class AbstractTrainStep:
    """Base class of a user's own step functions for Megatron-LM. `name` names the kind of model."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_batch_func(self, accelerator: object, megatron_dataset_flag: bool) -> NoReturn:
        """Return the function that takes a batch from an iterator; for a subclass to define."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_batch_func")

    def get_forward_step_func(self) -> NoReturn:
        """Return the function of one forward step; for a subclass to define."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_forward_step_func")

    def get_loss_func(self, accelerator: object) -> NoReturn:
        """Return the loss function; for a subclass to define."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_loss_func")


class _ModelTrainStep(AbstractTrainStep):
    """A step of one of Megatron-LM's own models, which this library does not run."""

    def __init__(self, accelerator: object, args: object) -> None:
        raise ConfigurationError(
            f"{type(self).__name__} drives a model class of Megatron-LM. Models keep their own classes here: pass the "
            "model to accelerator.prepare with MegatronLMPlugin or ParallelismConfig, which split it, and call it in "
            "your loop"
        )


class BertTrainStep(_ModelTrainStep):
    """The step of Megatron-LM's BERT. It cannot be created: the error names what to use."""


class GPTTrainStep(_ModelTrainStep):
    """The step of Megatron-LM's GPT. It cannot be created: the error names what to use."""


class T5TrainStep(_ModelTrainStep):
    """The step of Megatron-LM's T5. It cannot be created: the error names what to use."""
