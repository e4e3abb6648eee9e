# SPDX-License-Identifier: Apache-2.0
"""The API's objects that stand for what an engine makes: its `Dummy` classes, and the steps of Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import ConfigurationError, PrepareError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class Placeholder:
    """Stands for an object that an engine makes. Without that engine `prepare` refuses it.

    Fields:
        remedy: what to do in a run in which nothing takes its place.
    """

    remedy = ""


class DummyOptim(Placeholder):
    """A placeholder for the optimizer that a DeepSpeed configuration describes. Pass it to `prepare`.

    Args:
        params: parameters or groups of parameters, as for a torch optimizer.
        lr: learning rate, for an "auto" value of the configuration.
        weight_decay: weight decay, for an "auto" value of the configuration.
        **kwargs: further values, in the attribute `kwargs`.
    """

    remedy = (
        "it stands for the `optimizer` of a DeepSpeed configuration. Pass it to prepare together "
        "with its model in a run with a deepspeed_plugin, or create a torch optimizer"
    )

    def __init__(
        self, params: Iterable[object], lr: float = 0.001, weight_decay: float = 0, **kwargs: object
    ) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler(Placeholder):
    """A placeholder for the scheduler that a DeepSpeed configuration describes. Pass it to `prepare`.

    Args:
        optimizer: the optimizer, or the `DummyOptim`.
        total_num_steps: optimizer steps of the schedule, for an "auto" value of the configuration.
        warmup_num_steps: optimizer steps of the warm-up, for an "auto" value of the configuration.
        lr_scheduler_callable: makes the scheduler from the engine's optimizer, instead of the configuration.
        **kwargs: further values, in the attribute `kwargs`.
    """

    remedy = (
        "it stands for the `scheduler` of a DeepSpeed configuration. Pass it to prepare together "
        "with its model and optimizer in a run with a deepspeed_plugin, or create a torch "
        "scheduler"
    )

    def __init__(
        self,
        optimizer: object,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: object,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


class MegatronLMDummyDataLoader(Placeholder):
    """The arguments of Megatron-LM's own dataset, which only Megatron-LM can read.

    Args:
        dataset_kwargs: arguments of Megatron-LM's data provider, such as `data_path` and `seq_length`.
    """

    remedy = (
        "it names the files of Megatron-LM's own dataset, which this library does not read. "
        "Use a DataLoader"
    )

    def __init__(self, **dataset_kwargs: object) -> None:
        self.dataset_args = dataset_kwargs


class MegatronLMDummyScheduler(DummyScheduler):
    """The numbers of steps of the schedule that the plugin describes.

    Args:
        optimizer: the optimizer that it schedules.
        total_num_steps: optimizer steps of the entire run.
        warmup_num_steps: steps over which the learning rate rises.
        kwargs: other arguments of the scheduler.
    """

    remedy = (
        "it stands for Megatron-LM's own schedule, but with a MegatronLMPlugin models train with "
        "torch schedulers here. Create one with the plugin's lr_decay_style and these numbers of "
        "steps"
    )

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, total_num_steps, warmup_num_steps, **kwargs)


def refuse_placeholder(obj: object) -> None:
    """Raise PrepareError for an object that would take no effect in this run."""
    if isinstance(obj, Placeholder):
        raise PrepareError(f"{type(obj).__name__} has no effect in this run: {obj.remedy}")


def prepare_data_loader(accelerator: Any, dataloader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, prepared for the layout of the run: ranks that share one model replica read the same samples.

    Megatron-LM needs a special loader for that; `accelerator.prepare` does it with any loader.
    """
    prepared: DataLoader[Any] = accelerator.prepare_data_loader(dataloader)
    return prepared


class AbstractTrainStep:
    """Base class for custom Megatron-LM step functions. `name` is the kind of model."""

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
            f"{type(self).__name__} is for a Megatron-LM model class. Models keep their own "
            "classes here: pass the model to accelerator.prepare with MegatronLMPlugin or "
            "ParallelismConfig, which split it, and call it in your loop"
        )


class BertTrainStep(_ModelTrainStep):
    """The step of Megatron-LM's BERT. It cannot be created: the error names what to use."""


class GPTTrainStep(_ModelTrainStep):
    """The step of Megatron-LM's GPT. It cannot be created: the error names what to use."""


class T5TrainStep(_ModelTrainStep):
    """The step of Megatron-LM's T5. It cannot be created: the error names what to use."""


def add_model_config_to_megatron_parser(model_type: str) -> NoReturn:
    """Raise an error: model configurations are not translated into Megatron-LM arguments."""
    raise ConfigurationError(
        f"add_model_config_to_megatron_parser({model_type!r}): nothing is translated into "
        "Megatron-LM arguments here. Models keep their own classes and configurations: remove "
        "the registration, and pass the model to accelerator.prepare with MegatronLMPlugin or "
        "ParallelismConfig, which split it"
    )
