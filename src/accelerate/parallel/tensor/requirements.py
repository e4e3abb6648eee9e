# SPDX-License-Identifier: Apache-2.0
"""What tensor parallelism refuses: one table, run once before anything is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.utils import parametrize

from ...core.errors import PrepareError
from ...core.modules import direct_parameters
from ...placement.subclasses import is_quantized_layer

# Numbers of heads that an attention module keeps; a rank computes its share of them.
HEADS = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
)


def is_inside(name: str, module: str) -> bool:
    """Whether the name of a module is that of one inside another, whose name is empty for the model itself."""
    return not module or name.startswith(f"{module}.")


@dataclass(frozen=True)
class Split:
    """A model that is about to be split.

    Fields:
        modules: all modules of the model by name.
        styles: module name -> how it is split.
        size: the number of ranks.
    """

    modules: Mapping[str, nn.Module]
    styles: Mapping[str, ParallelStyle]
    size: int

    def layers(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """(name, module, whether it is split by columns) of the modules that are split by columns or rows."""
        for name, style in self.styles.items():
            if isinstance(style, ColwiseParallel | RowwiseParallel):
                yield name, self.modules[name], isinstance(style, ColwiseParallel)

    def columns(self) -> list[str]:
        """The layers whose outputs stay sharded."""
        columns = []
        for name, style in self.styles.items():
            if isinstance(style, ColwiseParallel) and isinstance(style.output_layouts[0], Shard):
                columns.append(name)
        return columns

    def regions(self) -> dict[str, str]:
        """Layer that reads sharded features -> the innermost module that has it and layers that return them."""
        columns = self.columns()
        regions = {}
        for name, style in self.styles.items():
            if not isinstance(style, RowwiseParallel) or not isinstance(
                style.input_layouts[0], Shard
            ):
                continue
            parent = name
            while parent:
                parent = parent.rpartition(".")[0]
                if any(is_inside(column, parent) for column in columns):
                    regions[name] = parent
                    break
        return regions

    def attentions(self) -> list[tuple[str, nn.Module]]:
        """The modules that have layers with sharded outputs, which a layer reads."""
        regions = set(self.regions().values())
        owners = set[str]()
        for column in self.columns():
            if any(is_inside(column, region) for region in regions):
                owners.add(column.removesuffix(".base_layer").rpartition(".")[0])
        return [(name, module) for name, module in self.modules.items() if name in owners]

    def heads(self) -> Iterator[tuple[str, nn.Module, str, int]]:
        """(name, module, attribute, number) of the numbers of heads that attention modules keep."""
        for name, module in self.attentions():
            for key in HEADS:
                count = getattr(module, key, None)
                if type(count) is int:
                    yield name, module, key, count


def _transformer_engine(split: Split) -> Iterator[str]:
    for name, module in split.modules.items():
        if type(module).__module__.startswith("transformer_engine"):
            yield (
                f"tp_size={split.size}: {name} is a Transformer Engine layer, which cannot be "
                "split. Compute in fp8 with torchao (AORecipeKwargs), whose layers can be split, "
                "or keep tp_size=1"
            )


def _other_weights(split: Split) -> Iterator[str]:
    for name, module, by_columns in split.layers():
        splits = f"the tensor-parallel plan splits {name},"
        if not isinstance(module, nn.Linear | nn.Embedding):
            kind = type(module).__name__
            yield f"{splits} a {kind}: only linear layers and embeddings can be split"
        elif is_quantized_layer(module):
            yield (
                f"{splits} whose weight is quantized ({type(module.weight).__name__}). Keep "
                "tp_size=1; FSDP2 can shard 4-bit bitsandbytes layers"
            )
        elif "weight" not in direct_parameters(module) or parametrize.is_parametrized(module):
            yield (
                f"{splits} whose weight is computed in each forward pass (parametrization, weight "
                "norm or pruning): use a plan without it"
            )
        elif isinstance(module.weight, DTensor):
            yield f"{splits} which is already a DTensor"
        elif isinstance(module, nn.Embedding) and module.max_norm is not None and not by_columns:
            yield f"{splits} an embedding whose max_norm changes rows as they are read"


def _undivided(split: Split) -> Iterator[str]:
    for name, module, by_columns in split.layers():
        if isinstance(module, nn.Linear):
            side = "out_features" if by_columns else "in_features"
        else:
            side = "embedding_dim" if by_columns else "num_embeddings"
        width = getattr(module, side, 0)
        if width % split.size:
            yield f"tp_size={split.size} does not divide {side}={width} of {name}"


def _split_heads(split: Split) -> Iterator[str]:
    for name, _, key, count in split.heads():
        if count % split.size:
            yield (
                f"tp_size={split.size} does not divide {key}={count} of {name}: heads cannot be "
                "split"
            )
    # A module that has a size of heads, but no number.
    sizes = {name: getattr(module, "head_dim", None) for name, module in split.attentions()}
    for name, module, by_columns in split.layers():
        head = sizes.get(name.removesuffix(".base_layer").rpartition(".")[0])
        if by_columns and isinstance(module, nn.Linear) and type(head) is int and head > 0:
            heads, remainder = divmod(module.out_features, head)
            if not remainder and heads % split.size:
                yield (
                    f"tp_size={split.size} does not divide the {heads} heads of {name}: heads "
                    "cannot be split"
                )


def check_plain(model: nn.Module) -> None:
    """Raise PrepareError for a model that is compiled already, in which a plan finds no layer by its name."""
    compiled = next(
        (name for name, _ in model.named_modules() if "_orig_mod" in name.split(".")), None
    )
    if compiled:
        raise PrepareError(
            f"{compiled}: torch.compile wrapped the model, or some of its layers, before they "
            "were split over tp. Pass the plain model to prepare and "
            "dynamo_plugin=TorchDynamoPlugin(...) to Accelerator"
        )


REQUIREMENTS: tuple[Callable[[Split], Iterator[str]], ...] = (
    _transformer_engine,
    _other_weights,
    _undivided,
    _split_heads,
)


def check(split: Split) -> None:
    """Raises PrepareError, naming a module, for a model that cannot be split so."""
    for requirement in REQUIREMENTS:
        for message in requirement(split):
            raise PrepareError(message)
