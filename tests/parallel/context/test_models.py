# SPDX-License-Identifier: Apache-2.0
"""Two ranks: models of transformers with split sequences against themselves; loaders that split; refusals."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from cases import cases, pairs
from layouts import compare_state
from packages import package
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.config.parallel import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from accelerate.core.errors import ConfigurationError
from accelerate.data_loader import skip_first_batches
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin

transformers = package("transformers")
PRELOADED = tuple(
    f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "gpt2", "bert")
)

BATCH, LENGTH, VOCABULARY, STEPS = 3, 16, 32, 4
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def start(plugin=None, **sizes):
    reset_states()
    handlers = {}
    if "cp_size" in sizes:
        handlers["cp_handler"] = TorchContextParallelConfig(sizes.pop("strategy", "alltoall"))
    layout = ParallelismConfig(**sizes, **handlers)
    return Accelerator(cpu=True, parallelism_config=layout, fsdp_plugin=plugin)


def llama(**options):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "attn_implementation": "sdpa", **options})
    ).train()


def batches(padding):
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        if padding == "behind":
            mask[0, 9:], mask[1, 15:] = 0, 0
        elif padding == "before":
            mask[0, :9], mask[1, :1] = 0, 0
        labels = ids.masked_fill(mask == 0, -100)
        yield ids, mask, labels


@on_ranks(2)
@pytest.mark.parametrize(
    ("sizes", "padding", "checkpointing", "shift"),
    [
        ({"cp_size": 2}, "none", False, True),
        ({"cp_size": 2}, "behind", True, True),
        ({"cp_size": 2, "strategy": "allgather"}, "before", False, False),
        ({"sp_size": 2}, "behind", True, False),
        ({"sp_size": 2}, "before", False, True),
    ],
    ids=[
        "all to all",
        "all to all, padded behind",
        "gather, padded before",
        "heads, padded behind",
        "heads, padded before",
    ],
)
def test_llama(sizes, padding, checkpointing, shift):
    accelerator = start(**sizes)
    plain, model = llama(), llama()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizers = [torch.optim.AdamW(found.parameters(), lr=0.01) for found in (plain, model)]
    model, optimizers[1] = accelerator.prepare(model, optimizers[1])
    layout = accelerator.strategy.sequence.layout
    for ids, mask, labels in batches(padding):
        expected = plain(input_ids=ids, attention_mask=mask, labels=labels)
        expected.loss.backward()
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        items = (layout.take(shifted, 1) != -100).sum()
        extra = {"shift_labels": shifted} if shift else {}
        whole_mask = mask.clone() if shift else None
        buffers = [ids, mask, labels, *extra.values()]
        with accelerator.maybe_context_parallel(
            buffers, [1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            given = mask if whole_mask is None else whole_mask
            out = model(input_ids=ids, attention_mask=given, labels=labels, **extra)
            if not checkpointing:
                accelerator.backward(out.loss, num_items=items)
            # A rank's loss is that of its part, so metrics have the value of each.
            assert accelerator.gather_for_metrics(out.loss).shape == (layout.ranks,)
        if checkpointing:
            # Outside of the block the layers are computed again as inside.
            accelerator.backward(out.loss, num_items=items)
        seen = layout.take(expected.logits, 1)[mask.bool()]
        torch.testing.assert_close(out.logits[mask.bool()], seen, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare_state(accelerator, model, plain.state_dict(), 1e-4)


@on_ranks(2)
@pytest.mark.parametrize("size", cases(["cp_size", "sp_size"], thorough=["sp_size"]))
def test_an_optimizer_that_decides_by_the_loss(size):
    """A rank's loss is that of its part; a line search on each rank's own makes different numbers of evaluations."""
    accelerator = start(**{size: 2})
    plain, model = llama(), llama()
    optimizers = [
        torch.optim.LBFGS(found.parameters(), lr=1, max_iter=3, line_search_fn="strong_wolfe")
        for found in (plain, model)
    ]
    model, optimizers[1] = accelerator.prepare(model, optimizers[1])
    layout = accelerator.strategy.sequence.layout
    shards = [dataclasses.replace(layout, rank=rank) for rank in range(2)]
    for number, (ids, _, _) in enumerate(batches("none")):
        labels = torch.roll(ids, -1, 1)
        # The parts are not equally easy.
        labels[:, : LENGTH // 2] = number

        def expected(ids=ids, labels=labels):
            optimizers[0].zero_grad()
            logits = plain(input_ids=ids).logits
            parts = [
                (one.take(logits, 1).flatten(0, 1), one.take(labels, 1).flatten()) for one in shards
            ]
            loss = sum(F.cross_entropy(*part) for part in parts) / 2
            loss.backward()
            return loss

        def closure(ids=ids, labels=labels):
            optimizers[1].zero_grad()
            own, wanted = ids.clone(), labels.clone()
            with accelerator.maybe_context_parallel(
                [own, wanted], [1, 1], no_restore_buffers={own, wanted}
            ):
                loss = F.cross_entropy(model(input_ids=own).logits.flatten(0, 1), wanted.flatten())
                accelerator.backward(loss)
            return loss

        optimizers[0].step(expected)
        optimizers[1].step(closure)
    compare_state(accelerator, model, plain.state_dict(), 1e-3)


def mistral():
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, sliding_window=5, attn_implementation="sdpa")
    ).train()


def gemma():
    """Layers with a window, and one without. Gradients of its norms are computed in float32."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=4,
        layer_types=kinds,
        sliding_window=4,
        query_pre_attn_scalar=4,
        attn_implementation="sdpa",
    )
    return transformers.Gemma3ForCausalLM(config).train()


def gpt2():
    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, **drops
    )
    return transformers.GPT2LMHeadModel(config).train()


def bert():
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    config = transformers.BertConfig(
        **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config).train()


def falcon():
    """One key head, which torch's attention broadcasts over the query heads."""
    torch.manual_seed(0)
    drops = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.FalconConfig(vocab_size=VOCABULARY, **sizes, **drops)
    return transformers.FalconForCausalLM(config).train()


def documents():
    """Positions that start anew within a row, at other places in each row; of one row nowhere."""
    starts = ([0, 5, 6], [0, 9], [0])
    return torch.stack(
        [
            torch.cat(
                [torch.arange(end - start) for start, end in zip(s, [*s[1:], LENGTH], strict=True)]
            )
            for s in starts
        ]
    )


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def own_mask():
    seen = torch.ones(1, 1, LENGTH, LENGTH).tril().bool() & (torch.arange(LENGTH) != 3)
    seen[..., 3, 3] = True
    return seen.expand(BATCH, 1, LENGTH, LENGTH)


MASKS = {
    "a window": (mistral, {}),
    "a window, padded": (mistral, {"padding": "before", "checkpointing": True}),
    "windows and none": (gemma, {"padding": "behind", "tolerance": 1e-6}),
    "windows and none, packed": (gemma, {"packed": True, "tolerance": 1e-6}),
    "packed": (llama, {"packed": True, "checkpointing": True}),
    "a mask": (llama, {"mask": own_mask()}),
}
# Each mask, and each exchange with windows, with packed samples and with a mask of the user's.
USUAL_MASKS = {
    ("a window", "all to all"), ("a window", "gather"), ("a window", "heads"), ("a window, padded", "gather"),
    ("windows and none", "heads"), ("windows and none, packed", "all to all"), ("packed", "gather"),
    ("packed", "heads"), ("a mask", "all to all"), ("a mask", "heads"),
}  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize(
    ("what", "kind"), pairs(MASKS, ["all to all", "gather", "heads"], USUAL_MASKS)
)
def test_masks(what, kind):
    """In float64, gradients and logits of what a model of transformers masks against itself alone."""
    torch.set_default_dtype(torch.float64)
    build, options = MASKS[what]
    check_masks(build, kind, **options)


@on_ranks(2)
@pytest.mark.parametrize(
    "kind", ["all to all", pytest.param("gather", marks=pytest.mark.thorough), "heads"]
)
@pytest.mark.parametrize(
    ("build", "padding"),
    pairs(
        [llama, gpt2, bert, falcon], ["behind", "before"],
        usual=[
            (llama, "behind"), (llama, "before"), (gpt2, "before"), (bert, "before"), (falcon, "before"),
        ],
    ),
)  # fmt: skip
def test_padding_that_has_labels(build, padding, kind):
    """Rows of padding count too, as where an end token is the padding: their logits and gradients are the model's."""
    torch.set_default_dtype(torch.float64)
    check_masks(build, kind, padding, labelled=True)


def check_masks(
    build,
    kind,
    padding="none",
    packed=False,
    mask=None,
    checkpointing=False,
    tolerance=1e-8,
    labelled=False,
):
    ids, keep, labels = next(batches(padding))
    if labelled:
        # No id is one that a model takes for padding.
        labels, ids = ids, ids.clamp(min=2)
    inputs = {"input_ids": ids}
    options = {"use_cache": not packed}  # beside a cache transformers takes no sequences for packed
    if packed:
        inputs["position_ids"] = documents()
    if padding != "none":
        inputs["attention_mask"] = keep
    if mask is not None:
        inputs["attention_mask"] = mask
    labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    plain = build()
    expected = plain(**inputs, **options).logits
    loss_of(expected, labels).backward()
    accelerator = start(sp_size=2) if kind == "heads" else start(
        cp_size=2, strategy={"all to all": "alltoall", "gather": "allgather"}[kind]
    )  # fmt: skip
    model = build()
    if checkpointing:
        model.gradient_checkpointing_enable()
    model = accelerator.prepare(model)
    layout = accelerator.strategy.sequence.layout
    own = {name: value.clone() for name, value in inputs.items()}
    own["shift_labels"] = labels.clone()
    buffers = [value for value in own.values() if value.dim() == 2]
    with accelerator.maybe_context_parallel(
        buffers, [1] * len(buffers), no_restore_buffers=set(buffers)
    ):
        shift_labels = own.pop("shift_labels")
        if checkpointing:
            # No longer buffers: positions of other ranks are fetched.
            own = {name: value.clone() for name, value in own.items()}
        logits = model(**own, **options).logits
        # A rank's loss is a part of a sum, and gradients are means over the ranks.
        accelerator.backward(loss_of(logits, shift_labels) * 2)
    seen = layout.take(torch.ones_like(keep) if labelled else keep, 1).bool()
    torch.testing.assert_close(logits[seen], layout.take(expected, 1)[seen], rtol=0, atol=1e-10)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole = parameter.grad.full_tensor()
        torch.testing.assert_close(
            whole, other.grad, rtol=0, atol=tolerance, msg=f"{name}: {{}}".format
        )


@on_ranks(2)
def test_loader():
    """Batches split by the loader; whole batches beside them are computed as ever."""
    accelerator = start(sp_size=2)
    plain, model = llama(), llama()
    data = [{"input_ids": row, "labels": row} for ids, _, _ in batches("none") for row in ids]
    loader = DataLoader(data, batch_size=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    prepared = accelerator.deepspeed_ulysses_dl_adapter(prepared, model)
    assert len(prepared) == STEPS
    (last,) = skip_first_batches(prepared, STEPS - 1)
    for whole, batch in zip(loader, prepared, strict=True):
        assert set(batch) == {"input_ids", "position_ids", "shift_labels"}
        assert batch["input_ids"].shape == (BATCH, LENGTH // 2)
        own = batch["shift_labels"]
        out = model(**batch)
        loss = F.cross_entropy(out.logits.flatten(0, 1), own.flatten())
        accelerator.backward(loss, num_items=(own != -100).sum())
        plain(**whole).loss.backward()
        theirs = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
        torch.testing.assert_close(
            accelerator.clip_grad_norm_(model.parameters(), 1e9), theirs, rtol=1e-4, atol=0
        )
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        with torch.no_grad():
            same = model(whole["input_ids"]).logits, plain(whole["input_ids"]).logits
        torch.testing.assert_close(*same)
    assert torch.equal(last["input_ids"], batch["input_ids"])
    check_batches_ahead(accelerator, plain, model)


def check_batches_ahead(accelerator, plain, model):
    """Batches may be taken from the loader before they are used, be copied, and have whole ones between them."""
    layout = accelerator.strategy.sequence.layout
    generator = torch.Generator().manual_seed(4)
    whole = [
        {"input_ids": torch.randint(VOCABULARY, (2, length), generator=generator)}
        for length in (16, 8, 8)
    ]
    whole[2]["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(2, -1)
    with torch.no_grad():
        wanted = [plain(**batch, use_cache=False).logits for batch in whole]
    coming = iter(accelerator.deepspeed_ulysses_dl_adapter([dict(batch) for batch in whole], model))
    parts = [next(coming) for _ in whole]
    for index, training in ((0, True), (2, False), (1, True), (2, True), (0, False)):
        model.train(training)
        with torch.no_grad():
            expected = layout.take(wanted[index], 1)
            found = model(**parts[index], use_cache=False).logits
            torch.testing.assert_close(found, expected)
            # As many rows as a part of the first batch has: whole, in an evaluation.
            evaluated = model.eval()(whole[1]["input_ids"]).logits
            torch.testing.assert_close(evaluated, wanted[1])
            copied = {name: value.clone() for name, value in parts[index].items()}
            torch.testing.assert_close(model.train()(**copied, use_cache=False).logits, expected)
    assert next(coming, None) is None


def refused(named, call, kind=ConfigurationError):
    try:
        call()
    except kind as error:
        text = "\n".join((str(error), *getattr(error, "__notes__", ())))
        assert all(word in text for word in named.split(" ... ")), f"{named}: {text}"
    else:
        raise AssertionError(f"accepted: {named}")


class Layer(nn.Module):
    """Attention in a few ways, over (batch, rows, 12)."""

    def __init__(self, heads=3, **options):
        super().__init__()
        self.inner, self.heads, self.options = nn.Linear(12, 12), heads, options

    def forward(self, x):
        x = x + self.options.get("table", 0)
        q = self.inner(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.options.get("eager"):
            return (q @ q.transpose(-1, -2)).softmax(-1) @ q
        keys = q[:, :, :3] if self.options.get("cross") else q
        options = {
            key: value for key, value in self.options.items() if key not in ("cross", "table")
        }
        return F.scaled_dot_product_attention(q, keys, keys, **options)


@on_ranks(2)
@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
def test_refusals(size):
    refused("mutually exclusive", lambda: ParallelismConfig(cp_size=2, sp_size=2))
    accelerator = start(**{size: 2})
    torch.manual_seed(0)

    def call(layer, shape=(2, 16, 12), **options):
        model = accelerator.prepare(layer)
        x = torch.randn(shape)
        with accelerator.maybe_context_parallel([x], options.pop("dims", [1])):
            model(options.pop("input", x))

    call(Layer(4, is_causal=True))
    call(Layer(4, attn_mask=torch.ones(8, 8, dtype=torch.bool).tril()))
    odd = 15 if size == "sp_size" else 14
    refused(f"has {odd} rows ... multiple of ... {size}=2", lambda: call(Layer(), (2, odd, 12)))
    refused(f"Layer ... {size}=2", lambda: call(Layer(eager=True)))
    refused("the output of Layer", lambda: call(Layer(4, cross=True)))
    refused("over 16 rows ... buffers", lambda: call(Layer(4), input=torch.randn(2, 16, 12)))
    note = f"{size}=2: each rank has 8 of the 16 rows ... position_ids"
    refused(note, lambda: call(Layer(4, table=torch.ones(16, 12))), RuntimeError)
    refused(
        "neither causal nor all true",
        lambda: call(Layer(4, attn_mask=torch.eye(8, dtype=torch.bool))),
    )
    refused("a bias", lambda: call(Layer(4, attn_mask=torch.randn(8, 8))))
    refused("buffer_seq_dims[0]=3", lambda: call(Layer(4), dims=[3]))
    refused("1 buffers and 2", lambda: call(Layer(4), dims=[1, 1]))
    whole = torch.randn(2, 16, 12)
    refused("not have buffers", lambda: accelerator.maybe_context_parallel().__enter__())
    refused(
        "one sequence: ... has 16 ... has 8",
        lambda: accelerator.maybe_context_parallel([whole, whole[:, :8]], [1, 1]).__enter__(),
    )
    refused(
        "takes part in autograd",
        lambda: accelerator.maybe_context_parallel(
            [whole.clone().requires_grad_()], [1]
        ).__enter__(),
    )
    assert F.scaled_dot_product_attention.__module__ != "accelerate.parallel.context.region"
    call(Layer(4, dropout_p=0.5))
    call(Layer(4, attn_mask=torch.randn(4, 16, 16)))
    if size == "sp_size":
        refused("sp_size=2 does not divide the 3", lambda: call(Layer(3)))
    accelerator = start(FullyShardedDataParallelPlugin(fsdp_version=2), **{size: 2})
    refused("the output of Layer", lambda: call(Layer(eager=True)))


@on_ranks(2)
def test_options_that_are_not_met_are_refused():
    fixed = DeepSpeedSequenceParallelConfig(sp_seq_length=32, sp_seq_length_is_variable=False)
    accelerator = start(sp_size=2, sp_handler=fixed)
    refused(
        "sp_seq_length=32",
        lambda: accelerator.maybe_context_parallel([torch.ones(1, 16)], [1]).__enter__(),
    )
    flash = DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")
    refused("flash_attention_2", lambda: start(sp_size=2, sp_handler=flash))


@on_ranks(2)
def test_late_backward():
    """Outside of the block the token ids are whole again: torch notices, instead of a wrong gradient."""
    accelerator = start(cp_size=2)
    model = accelerator.prepare(llama())
    ids = torch.randint(VOCABULARY, (1, LENGTH))
    with accelerator.maybe_context_parallel([ids.clone()], [1]):
        refused("no input of ... 8 of the 16 rows", lambda: model(ids))
    with accelerator.maybe_context_parallel([ids], [1]):
        loss = model(ids).logits.square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        accelerator.backward(loss)
    assert math.isfinite(loss.item())
