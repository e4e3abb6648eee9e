# SPDX-License-Identifier: Apache-2.0
"""GradientState: where an accumulation window stands, and which prepared loader is being read."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from .core.objects import forwarded

if TYPE_CHECKING:
    from .config.training import GradientAccumulationPlugin


class GradientState:
    """Whether this batch ends an accumulation window, and which loader is being read. Shared by all instances.

    Args:
        gradient_accumulation_plugin: the options of accumulation, which replace those given before.

    Attributes:
        sync_gradients: the backward of this batch synchronizes gradients, and the optimizer steps after it.
        plugin_kwargs: the options of accumulation.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    _is_xla_gradients_synced: bool
    _references: list[weakref.ref[Any] | None]

    def __init__(
        self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    ) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.__dict__.update(
                sync_gradients=True,
                _references=[None],
                plugin_kwargs={},
                _is_xla_gradients_synced=False,
            )
        if gradient_accumulation_plugin is not None:
            kwargs = gradient_accumulation_plugin.to_kwargs()
            if self.plugin_kwargs != kwargs:
                self.plugin_kwargs = kwargs

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, here or in another process, has the state that is shared there.
        return type(self), ()

    @property
    def initialized(self) -> bool:
        """Whether an instance has been made."""
        return "sync_gradients" in self.__dict__

    @property
    def num_steps(self) -> int:
        """Batches in one step of the optimizer."""
        steps: int = self.plugin_kwargs.get("num_steps", 1)
        return steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count the batches at which the optimizer does not step."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends the accumulation window."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Whether every batch synchronizes gradients, which saves memory under FSDP."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that is being read (the innermost one), or None."""
        reference = self._references[-1]
        if reference is None:
            return None
        return reference()

    @property
    def dataloader_references(self) -> list[Any]:
        """The prepared loaders that are being read, outermost first, after a leading None."""
        return [None if reference is None else reference() for reference in self._references]

    @dataloader_references.setter
    def dataloader_references(self, loaders: list[Any]) -> None:
        self._references = [None, *map(weakref.ref, loaders[1:])]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader's present batch is its last."""
        loader = self.active_dataloader
        if loader is None:
            return False
        return bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples of the active loader's last global batch without repetitions; -1 where that is not known."""
        loader = self.active_dataloader
        if loader is None:
            return -1
        return int(loader.remainder)

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.active_dataloader is not None

    is_xla_gradients_synced: bool = forwarded(
        "_is_xla_gradients_synced",
        "Whether gradients have been reduced on XLA devices.",
        settable=True,
    )

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        self._references.append(weakref.ref(dataloader))

    def _remove_dataloader(self, dataloader: Any) -> None:
        self._references = [
            reference
            for reference in self._references
            if reference is None or reference() not in (dataloader, None)
        ]

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        """Clear the shared state."""
        GradientState._shared_state.clear()
