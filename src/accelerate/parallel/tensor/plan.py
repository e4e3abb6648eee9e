# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel plans: styles by name, the modules they match, inferred plans, and those along the sequence."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ...config.parallel import TorchTensorParallelConfig
from ...core.errors import PrepareError
from ...core.modules import direct_parameters
from ..adapters import adapted_plan
from ..unwrap import is_peft_model
from . import styles as kinds
from .layers import ShardedLoss, SharedInput

Plan = Mapping[str, "str | ParallelStyle"]
Styles = dict[str, ParallelStyle]

# The styles of a plan. "colwise" splits the outputs, "rowwise" the inputs; a pair of them needs one all-reduce.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": kinds.Colwise,
    "rowwise": kinds.Rowwise,
    "colwise_rep": lambda: kinds.Colwise(Replicate()),
    "colwise_gather_output": lambda: kinds.Colwise(Replicate()),
    "rowwise_rep": lambda: kinds.Rowwise(full_input=True),
    "rowwise_split_input": lambda: kinds.Rowwise(full_input=True),
    "embedding_rowwise": lambda: kinds.Rowwise(full_input=True),
    "embedding_colwise": lambda: kinds.Colwise(Replicate()),
    "replicate": kinds.Unsplit,
    "replicated_with_grad_allreduce": kinds.PerHead,
    # Along the sequence: the residual stream is sharded before a module, or gathered after it.
    "sequence_split": kinds.SequenceEntry,
    "sequence_parallel": kinds.SequenceNorm,
    "sequence_parallel_gather": lambda: kinds.SequenceNorm(gather=True),
    "sequence_gather": kinds.SequenceExit,
    "rowwise_sequence": lambda: kinds.Rowwise(along_sequence=True),
}

GIVE_A_PLAN = (
    "Pass a plan, as in tp_handler=TorchTensorParallelConfig(plan={'blocks.*.up': 'colwise', "
    "'blocks.*.down': 'rowwise'})"
)

# Usual names of the linear layers of attention and MLP blocks: (colwise, rowwise) of one parent.
_PAIRS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"q_proj", "k_proj", "v_proj"}), "o_proj"),
    (frozenset({"q_proj", "k_proj", "v_proj"}), "out_proj"),
    (frozenset({"wq", "wk", "wv"}), "wo"),
    (frozenset({"gate_proj", "up_proj"}), "down_proj"),
    (frozenset({"up_proj"}), "down_proj"),
    (frozenset({"w1", "w3"}), "w2"),
    (frozenset({"fc1"}), "fc2"),
    (frozenset({"up"}), "down"),
)
# Norms of each head in an attention block.
_HEAD_NORMS = frozenset({"q_norm", "k_norm", "q_layernorm", "k_layernorm"})
# Queries, keys and values in one matrix, whose order of rows is not known.
_FUSED = frozenset({"qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "wqkv", "in_proj"})


def styles_of(
    model: nn.Module, options: TorchTensorParallelConfig, size: int
) -> tuple[Styles, ShardedLoss | None]:
    """Module name -> how it is split, by the user's plan, the model's own, or an inferred one; and a sharded loss."""
    models_plan = getattr(model, "_tp_plan", None)
    if options.plan is not None:
        styles = match_plan(model, options.plan)
    elif models_plan:
        # A family of models shares a plan, which may name modules that this one does not have.
        if is_peft_model(model):
            adapted = adapted_plan(model, models_plan, name_pattern)
            styles = {name: _style(name, style) for name, style in adapted.items()}
            _share_inputs(styles)
        else:
            styles = match_plan(model, models_plan, strict=False)
        if not styles:
            raise PrepareError(
                "no rule of the model's own tensor-parallel plan fits a module of "
                f"{type(model).__name__}: its modules have different names, for example because a "
                f"library wrapped the model or its layers. {GIVE_A_PLAN}. For peft LoRA: "
                "base_layer and lora_B.default 'colwise' in a layer split by columns, base_layer "
                "and lora_A.default 'rowwise' in one split by rows"
            )
    else:
        styles = match_plan(model, infer_plan(model, size))
    loss = None
    if options.loss_parallel:
        loss = split_loss(model, styles)
    if options.sequence_parallel:
        styles = along_sequence(model, styles)
    return styles, loss


def match_plan(model: nn.Module, plan: Plan, strict: bool = True) -> Styles:
    """Module name -> style, in the order of the model. The first pattern that matches a name applies.

    Raises:
        PrepareError: for an unknown style, and with `strict` for a pattern that matches no module.
    """
    patterns = {pattern: name_pattern(pattern) for pattern in plan}
    unused = set(plan)
    found: Styles = {}
    for name, _ in model.named_modules():
        for pattern, expression in patterns.items():
            if expression.fullmatch(name):
                unused.discard(pattern)
                if name not in found:
                    found[name] = _style(pattern, plan[pattern])
    if unused and strict:
        raise PrepareError(
            f"the tensor-parallel plan names modules that {type(model).__name__} does not have: "
            f"{', '.join(sorted(unused))}"
        )
    _share_inputs(found)
    return found


def name_pattern(pattern: str) -> re.Pattern[str]:
    """The names that a pattern of a plan stands for, whose `*` is one word."""
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _style(pattern: str, requested: str | ParallelStyle) -> ParallelStyle:
    if isinstance(requested, ParallelStyle):
        return requested
    if requested not in STYLES:
        if str(requested).startswith(("moe_", "ep_", "grouped_gemm")):
            raise PrepareError(
                f"the tensor-parallel plan requests {requested!r} at {pattern}, but layers of "
                "experts cannot be split. Use a plan without them (each rank then has all "
                "experts), or shard the model with FSDP2 instead"
            )
        raise PrepareError(
            f"the tensor-parallel plan requests {requested!r} at {pattern}, which is unknown: use "
            f"one of {list(STYLES)}"
        )
    return STYLES[requested]()


def _share_inputs(styles: Styles) -> None:
    """Let colwise layers of one parent, which usually read the same tensor, share its messages."""
    siblings: dict[str, list[kinds.Colwise]] = {}
    for name, style in styles.items():
        if isinstance(style, kinds.Colwise):
            # The layer itself, inside of one with adapters.
            parent = name.removesuffix(".base_layer").rpartition(".")[0]
            siblings.setdefault(parent, []).append(style)
    for listed in siblings.values():
        shared = SharedInput(len(listed))
        for style in listed:
            style.shared = shared


def infer_plan(model: nn.Module, size: int) -> dict[str, str]:
    """A plan for attention and MLP blocks whose linear layers have usual names, and for embedding and output layer.

    Raises:
        PrepareError: where no block is recognized, or one has modules whose role in the split is not known.
    """
    plan: dict[str, str] = {}
    for name, parent in model.named_modules():
        children = dict(parent.named_children())
        if isinstance(parent, nn.MultiheadAttention) or _FUSED & children.keys():
            what = next(iter(sorted(_FUSED & children.keys())), "in_proj_weight")
            raise PrepareError(
                f"no tensor-parallel plan can be inferred for {name or type(parent).__name__}: "
                f"{what} contains queries, keys and values in one matrix. Pass a plan, with a "
                "separate layer for each."
            )
        plan.update(_plan_of_block(name, children))
    if not plan:
        raise PrepareError(
            f"no tensor-parallel plan can be inferred for {type(model).__name__}: none of its "
            "modules has linear layers named like an attention or MLP block (q_proj, k_proj, "
            f"v_proj, o_proj; up_proj, down_proj). {GIVE_A_PLAN}"
        )
    embedding, head = vocabulary_ends(model, plan)
    if embedding is None or head is None:
        return plan
    vocabulary_size: int = model.get_submodule(head).out_features  # type: ignore[assignment]
    if vocabulary_size % size == 0:
        plan |= {embedding: "embedding_rowwise", head: "colwise_gather_output"}
    return plan


def _plan_of_block(name: str, children: Mapping[str, nn.Module]) -> dict[str, str]:
    linear = {key for key, child in children.items() if isinstance(child, nn.Linear)}
    for columns, row in _PAIRS:
        if not columns <= linear or row not in linear:
            continue
        prefix = f"{name}." if name else ""
        plan = {f"{prefix}{key}": "colwise" for key in sorted(columns)}
        plan[f"{prefix}{row}"] = "rowwise"
        unknown = []
        outputs = min(int(children[key].out_features) for key in columns)  # type: ignore[arg-type]
        for key, child in children.items():
            if key in columns | {row} or not any(True for _ in child.parameters()):
                continue
            # A norm over all heads at once would need an all-reduce inside of it.
            over_all_heads = max(parameter.numel() for parameter in child.parameters()) >= outputs
            if over_all_heads:
                unknown.append(key)
            elif key in _HEAD_NORMS:
                plan[f"{prefix}{key}"] = "replicated_with_grad_allreduce"
        if unknown:
            likely = {re.sub(r"\b\d+\b", "*", key): word for key, word in plan.items()}
            raise PrepareError(
                f"no tensor-parallel plan can be inferred for {name}: how {', '.join(unknown)} "
                "takes part in the split is unknown. If it runs before or after the split "
                "layers, and not between them, pass "
                f"tp_handler=TorchTensorParallelConfig(plan={likely})"
            )
        return plan
    return {}


def vocabulary_ends(model: nn.Module, inner: Collection[str]) -> tuple[str | None, str | None]:
    """The names of the embedding and the output layer of a language model; None where they are ambiguous.

    `inner` are layers that are known to be neither.
    """
    embeddings = {}
    outer_linears = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            embeddings[name] = module.weight.shape
        elif isinstance(module, nn.Linear) and name not in inner:
            outer_linears[name] = module.weight.shape
    pairs = []
    for pair in itertools.product(embeddings, outer_linears):
        if embeddings[pair[0]] == outer_linears[pair[1]]:
            pairs.append(pair)
    if len(pairs) == 1:
        return pairs[0]
    return (None, None)


def split_loss(model: nn.Module, styles: Styles) -> ShardedLoss:
    """Add the styles with which the logits stay sharded over the vocabulary while the model computes its loss.

    Raises:
        PrepareError: where the output layer is ambiguous.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    inner = []
    for name_of_split, style in styles.items():
        if not isinstance(style, ColwiseParallel) or not style.output_layouts[0].is_replicate():
            inner.append(name_of_split)
    names = {module: name for name, module in model.named_modules()}
    _, likely = vocabulary_ends(model, inner)
    name = names.get(head, likely)
    if name is None:
        raise PrepareError(
            f"loss_parallel=True: which layer of {type(model).__name__} returns the logits is "
            "ambiguous (it should be a linear layer with the embedding's shape, or "
            "get_output_embeddings())"
        )
    loss = ShardedLoss()
    weight = model.get_submodule(name).weight
    for other, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight is weight:
            styles[other] = kinds.Rowwise(full_input=True)
    styles[name] = kinds.Colwise(Replicate(), loss)
    return loss


def along_sequence(model: nn.Module, styles: Styles) -> Styles:
    """A plan of split layers, with the residual stream between them sharded along the sequence.

    The stream is sharded before the first block of each list of blocks, and gathered after the last one or the norm
    that follows. Norms and the stream are computed once instead of on every rank, and each all-reduce becomes a
    reduce-scatter and an all-gather of the same bytes. Source: Korthikanti et al., Reducing Activation Recomputation
    (2022).

    Raises:
        PrepareError: where the model has no such list, or a block has an unsplit module that is not a norm.
    """
    modules = dict(model.named_modules())
    rows = [
        name
        for name, style in styles.items()
        if isinstance(style, RowwiseParallel) and isinstance(modules[name], nn.Linear)
    ]
    lists = _block_lists(modules, rows)
    inside = tuple(f"{blocks}." for blocks in lists)
    outside = [name for name in rows if not name.startswith(inside)]
    if outside or not lists:
        raise PrepareError(
            f"sequence_parallel=True: {', '.join(outside[:3]) or type(model).__name__} is in no "
            "list of blocks (a ModuleList whose entries are all split), so where to shard the "
            "sequence is unknown. Pass a plan with the words sequence_split, sequence_parallel, "
            "rowwise_sequence and sequence_gather."
        )
    found = dict(styles)
    for name in rows:
        style = styles[name]
        if not isinstance(style, kinds.Rowwise):
            raise PrepareError(
                f"sequence_parallel=True: use 'rowwise' at {name} instead of a ParallelStyle object"
            )
        found[name] = kinds.Rowwise(style.full_input, along_sequence=True)
    for name in lists:
        # The features of the residual stream: the outputs of the blocks' rowwise layers.
        row = next(row for row in rows if row.startswith(f"{name}."))
        width = int(modules[row].out_features)
        for norm in _norms(name, modules, styles, width):
            found[norm] = kinds.SequenceNorm()
        keys = [f"{name}.{key}" for key, _ in modules[name].named_children()]
        found[keys[0]] = kinds.SequenceEntry()
        after = _norm_after(name, modules, styles, width)
        if after is not None:
            found[after] = kinds.SequenceNorm(gather=True)
        elif len(keys) == 1:
            found[keys[0]] = kinds.SequenceEntry(gather=True)
        else:
            found[keys[-1]] = kinds.SequenceExit()
    return found


def _block_lists(modules: dict[str, nn.Module], rows: list[str]) -> list[str]:
    """The outermost lists in which every entry contains a rowwise layer."""
    lists: list[str] = []
    for name, module in modules.items():
        is_inner = name.startswith(tuple(f"{outer}." for outer in lists))
        if is_inner or not isinstance(module, nn.ModuleList):
            continue
        entries = {f"{name}.{key}." for key, _ in module.named_children()}
        without_rows = {entry for entry in entries if not any(r.startswith(entry) for r in rows)}
        if entries and not without_rows:
            lists.append(name)
    return lists


def _norms(blocks: str, modules: dict[str, nn.Module], styles: Styles, width: int) -> list[str]:
    """The modules in a list of blocks that have parameters and are not split, which must be norms of the stream."""
    found = []
    for name, module in modules.items():
        if not name.startswith(f"{blocks}.") or name in styles:
            continue
        if not direct_parameters(module):
            continue
        if not _is_norm(module, width):
            raise PrepareError(
                f"sequence_parallel=True: {name} ({type(module).__name__}) is neither split nor a "
                f"norm of the {width} features of the stream, so how it works on a shard of the "
                "sequence is unknown"
            )
        found.append(name)
    return found


def _is_norm(module: nn.Module, width: int) -> bool:
    shapes = [parameter.shape for parameter in direct_parameters(module).values()]
    return bool(shapes) and all(shape == (width,) for shape in shapes)


def _norm_after(
    blocks: str, modules: dict[str, nn.Module], styles: Styles, width: int
) -> str | None:
    """The norm after a list of blocks, in the module that contains the list."""
    parent, _, key = blocks.rpartition(".")
    names = [child for child, _ in modules[parent].named_children()]
    for child in names[names.index(key) + 1 :]:
        name = f"{parent}.{child}" if parent else child
        if name not in styles and _is_norm(modules[name], width):
            return name
    return None
