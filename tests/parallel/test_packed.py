# SPDX-License-Identifier: Apache-2.0
"""Packed rows in each layout, against a plain loop over the same documents without packing, in float64 to 1e-10."""

import copy
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cases import cases
from layouts import compare, compare_state, units_of
from packages import package
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention, varlen

from accelerate import Accelerator
from accelerate.config.training import TorchDynamoPlugin
from accelerate.core.documents import Documents
from accelerate.core.errors import ConfigurationError
from accelerate.parallel import document_attention
from accelerate.parallel.unwrap import extract_model_from_parallel
from accelerate.parallelism_config import ParallelismConfig

sys.path.append(str(Path(__file__).parents[2] / "examples" / "parallel"))
from llama import Llama, LlamaConfig

transformers = package("transformers")
PRELOADED = tuple(
    f"transformers.models.{name}.modeling_{name}" for name in ("llama", "bert", "gpt2")
)
pytestmark = pytest.mark.usefixtures("float64")

VOCABULARY, ROWS, LENGTH, STEPS = 32, 2, 16, 20
# Micro-batches of a window: an odd number.
ACCUMULATION = 3
# The lengths in rows; each rank and micro-batch takes the next ones.
LENGTHS = [[5, 8, 3], [16], [1, 9, 6], [7, 9], [2, 2, 2, 10], [11, 5], [4, 12]]
LAYOUTS = {
    "plain": (1, {}, False),
    "ddp": (2, {}, False),
    "fsdp": (2, {"dp_shard_size": 2}, True),
    "tp": (2, {"tp_size": 2}, False),
    "cp": (2, {"cp_size": 2}, False),
    "sp": (2, {"sp_size": 2}, False),
    "cp 4": (4, {"cp_size": 4}, False),
    "dp x cp": (4, {"dp_shard_size": 2, "cp_size": 2}, True),
    "hsdp x tp": (4, {"dp_shard_size": 2, "tp_size": 2}, True),
}


def own(**options):
    torch.manual_seed(0)
    return Llama(
        LlamaConfig(vocabulary=VOCABULARY, width=16, hidden=24, layers=2, kv_heads=2, **options)
    )


def of_transformers(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa", **options,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().train()
    # Those of transformers compute in float32.
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, nn.RMSNorm(16))
    return model


MODELS = {"own": (own, "Block"), "llama": (of_transformers, "LlamaDecoderLayer")}


def start(layout, block="Block", **options):
    reset_states()
    _, sizes, fsdp = LAYOUTS[layout]
    return Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        fsdp_plugin=units_of(block) if fsdp else None,
        **options,
    )


def micro_batch(number, shards=1):
    """Micro-batch `number` of all shards of the data: (shards * ROWS, LENGTH) tokens and the lengths of documents."""
    generator = torch.Generator().manual_seed(number)
    rows = shards * ROWS
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    lengths = [LENGTHS[(number * rows + row) % len(LENGTHS)] for row in range(rows)]
    return ids, lengths


def documents_of(ids, lengths):
    return [
        document for row, sizes in zip(ids, lengths, strict=True) for document in row.split(sizes)
    ]


def next_tokens(ids, lengths):
    """The labels of rows: the next token of the document."""
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    for row, sizes in zip(labels, lengths, strict=True):
        row[torch.tensor(sizes).cumsum(0) - 1] = -100
    return labels


def padded(lengths):
    most = max(map(len, lengths))
    return torch.tensor([sizes + [0] * (most - len(sizes)) for sizes in lengths])


def logits_of(output):
    return output.logits if hasattr(output, "logits") else output


def summed(model, ids, lengths):
    """The sum of the losses of all documents, computed one by one."""
    total = 0.0
    for document in documents_of(ids, lengths):
        logits = logits_of(model(document[None]))[0, :-1]
        total = total + F.cross_entropy(logits, document[1:], reduction="sum")
    return total


def plain_steps(make, shards):
    """The state after the steps, the mean loss of each, and its gradients."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, gradients = [], []
    for step in range(STEPS):
        window = [micro_batch(step * ACCUMULATION + part, shards) for part in range(ACCUMULATION)]
        items = sum(int((next_tokens(*batch) != -100).sum()) for batch in window)
        loss = sum(summed(model, *batch) for batch in window) / items
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), losses, gradients


def full_gradients(model):
    """Those of all ranks, which gather them."""
    gradients = {}
    for name, parameter in extract_model_from_parallel(model).named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        gradients[name] = gradient
    return gradients


def fields(form, lengths):
    if form == "lists":
        return {"seq_lens": lengths}
    if form == "tensor":
        return {"seq_lens": padded(lengths)}
    if form == "array":
        return {"seq_lens": padded(lengths).numpy()}
    if form == "tensors":
        return {"seq_lens": [torch.tensor(row) for row in lengths]}
    bounds = list(itertools.accumulate(itertools.chain(*lengths), initial=0))
    return {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}


def check_layout(layout, kind):
    make, block = MODELS[kind]
    accelerator = start(layout, block, gradient_accumulation_steps=ACCUMULATION)
    strategy = accelerator.strategy
    shard, shards = strategy.data_shard
    expected, losses, gradients = plain_steps(make, shards)
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    forms = itertools.cycle(["lists", "tensor", "array", "tensors", "cu_seqlens"])
    for step in range(STEPS):
        total = items = 0
        for part in range(ACCUMULATION):
            ids, lengths = micro_batch(step * ACCUMULATION + part, shards)
            mine = slice(shard * ROWS, (shard + 1) * ROWS)
            ids, lengths = ids[mine], lengths[mine]
            targets = next_tokens(ids, lengths)
            batch = {"input_ids": ids, **fields(next(forms), lengths)}
            if kind == "llama":
                batch["attention_mask"] = torch.ones_like(ids)
            tensors = [
                targets,
                *(
                    value
                    for value in batch.values()
                    if torch.is_tensor(value) and value.shape == ids.shape
                ),
            ]
            with accelerator.accumulate(model):
                with accelerator.maybe_context_parallel(
                    buffers=tensors,
                    buffer_seq_dims=[1] * len(tensors),
                    no_restore_buffers=set(tensors),
                ):
                    logits = logits_of(model(**batch))
                    count = int((targets != -100).sum())
                    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                    accelerator.backward(loss / max(count, 1), num_items=count)
                if accelerator.sync_gradients:
                    compare(full_gradients(model), gradients[step], 1e-10, f"gradients of {step}")
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
            items += count
        summed_up = accelerator.reduce(torch.tensor([total, float(items)]), "sum")
        assert float(summed_up[0] / summed_up[1]) == pytest.approx(losses[step], abs=1e-10), step
    compare_state(accelerator, model, expected, 1e-10)


@pytest.mark.parametrize("kind", MODELS)
def test_plain(kind):
    check_layout("plain", kind)


@on_ranks(2)
@pytest.mark.parametrize(
    ("layout", "kind"),
    cases(
        [
            ("ddp", "own"),
            ("fsdp", "llama"),
            ("tp", "own"),
            ("cp", "own"),
            ("cp", "llama"),
            ("sp", "llama"),
            ("ddp", "llama"),
            ("fsdp", "own"),
            ("tp", "llama"),
            ("sp", "own"),
        ],
        thorough=[
            ("cp", "llama"),
            ("ddp", "llama"),
            ("fsdp", "own"),
            ("tp", "llama"),
            ("sp", "own"),
        ],
    ),
)
def test_two_ranks(layout, kind):
    check_layout(layout, kind)


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "kind"),
    cases(
        [
            ("cp 4", "llama"),
            ("cp 4", "own"),
            ("dp x cp", "llama"),
            ("hsdp x tp", "own"),
            ("dp x cp", "own"),
        ],
        thorough=[("cp 4", "own"), ("dp x cp", "llama"), ("dp x cp", "own"), ("hsdp x tp", "own")],
    ),
)
def test_four_ranks(layout, kind):
    check_layout(layout, kind)


# -- models


class Recurrent(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, input_ids):
        return self.gru(self.embedding(input_ids))[0]


class TwoOutputs(Recurrent):
    """Only the first output mixes documents."""

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        return self.gru(x)[0], x


class RecurrentWithBounds(Recurrent):
    def forward(self, input_ids, cu_seqlens):
        assert cu_seqlens.dtype == torch.int32
        sizes = cu_seqlens.diff().tolist()
        flat = self.embedding(input_ids).flatten(0, 1)
        outputs = [self.gru(document[None])[0][0] for document in flat.split(sizes)]
        return torch.cat(outputs).view(*input_ids.shape, -1)


class OwnAttention(nn.Module):
    """Multiplies matrices itself."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        return x + self.attention(x, x, x)[0]


class Encoder(nn.Module):
    """Layers that torch fuses in evaluation, and a recomputed block."""

    def __init__(self, width=8, recomputes=False, use_reentrant=False):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.recomputes = recomputes
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.forwards = 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids):
        self.forwards += 1
        self.calls += 1
        x = self.embedding(input_ids)
        if self.recomputes:
            return torch.utils.checkpoint.checkpoint(
                self.layer, x, use_reentrant=self.use_reentrant
            )
        return self.layer(x)


class Counting(nn.Module):
    """Counts its positions along the row."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)

    def forward(self, input_ids):
        return self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1]))


class Wrapper(nn.Module):
    """A model of one's own around one of transformers, whose positions are absolute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=32
        )
        self.inner = transformers.GPT2LMHeadModel(config).double().eval()

    def forward(self, input_ids):
        return self.inner(input_ids).logits

    def train(self, mode=True):
        # Without dropout.
        self.training = mode
        return self


def bert(**options):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config).double()


def changed_share(model, ids, lengths, first, changed, block=None):
    """The share of rows of document `first` whose output changes with a token of document `changed`."""
    with torch.no_grad():
        outputs = []
        bounds = list(itertools.accumulate(lengths[0], initial=0))
        for value in (ids[0, bounds[changed]], (ids[0, bounds[changed]] + 1) % VOCABULARY):
            batch = ids.clone()
            batch[0, bounds[changed]] = value
            outputs.append(logits_of(model(batch, seq_lens=lengths)))
    rows = slice(bounds[first], bounds[first + 1])
    return float((outputs[0] - outputs[1])[0, rows].ne(0).any(dim=-1).double().mean())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "make",
    [own, of_transformers, bert, Encoder, Wrapper, lambda: of_transformers(sliding_window=3)],
    ids=["own", "llama", "bert", "torch", "wrapper", "window"],
)
def test_other_documents_change_nothing(make, training):
    model = start("plain").prepare(make()).train(training)
    ids, _ = micro_batch(0)
    lengths = [[5, 11], [8, 8]]
    # A first forward, which is compared.
    model(ids, seq_lens=lengths)
    assert changed_share(model, ids, lengths, 0, 1) == 0
    assert changed_share(model, ids, lengths, 1, 0) == 0
    # Without lengths the row is one document.
    assert changed_share(model, ids, [[16], [16]], 0, 0) == 1
    # A document has the outputs that it has alone.
    output = logits_of(model(ids, seq_lens=lengths))
    torch.testing.assert_close(output[1, 8:], logits_of(model(ids[1:, 8:]))[0], rtol=0, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("size", ["cp", "sp"])
def test_other_documents_change_nothing_over_ranks(size):
    accelerator = start(size)
    plain, model = Wrapper(), accelerator.prepare(Wrapper())
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (1, LENGTH), generator=generator)
    outputs = []
    for value in (0, 1):
        ids[0, 7] = value
        shard = ids.clone()
        with accelerator.maybe_context_parallel([shard], [1], no_restore_buffers={shard}):
            logits = model(shard, seq_lens=[[7, 9]])
            rows = accelerator.strategy.sequence.region.positions(ids.device)
        outputs.append(logits[:, rows < 7])
        alone = torch.cat([plain(ids[:, :7]), plain(ids[:, 7:])], dim=1)
        torch.testing.assert_close(logits, alone[:, rows])
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Recurrent, "GRU"),
        (TwoOutputs, "GRU"),
        (OwnAttention, "MultiheadAttention"),
        (lambda: bert(attn_implementation="eager"), "BertSelfAttention"),
        (Counting, "the output"),
    ],
    ids=["recurrent", "two outputs", "own attention", "eager", "positions"],
)
def test_a_model_that_mixes_documents_is_named(make, named):
    model = start("plain").prepare(make())
    ids, lengths = micro_batch(0)
    with pytest.raises(ConfigurationError, match=named) as raised:
        model(ids, seq_lens=lengths)
    assert "cu_seqlens" in str(raised.value)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("is_later", [False, True])
def test_rows_that_only_one_rank_has_packed(layout, is_later):
    accelerator = start(layout)
    rank = accelerator.process_index
    plain, model = own(), accelerator.prepare(own())
    ids, _ = micro_batch(0, shards=2)
    mine = ids[rank * ROWS : (rank + 1) * ROWS]
    if is_later:
        # A first forward that is packed on no rank.
        model(mine)
    lengths = [[16], [16], [5, 11], [8, 8]]
    kwargs = {}
    if rank == 1:
        kwargs["seq_lens"] = lengths[ROWS:]
    accelerator.backward(model(mine, **kwargs).square().sum())
    for document in documents_of(ids, lengths):
        (plain(document[None]).square().sum() / 2).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    compare(full_gradients(model), expected, 1e-10, "gradients")


@on_ranks(2)
def test_a_model_that_mixes_documents_is_named_on_all_ranks_of_a_sharded_one():
    accelerator = start("fsdp", "GRU")
    model = accelerator.prepare(Recurrent())
    ids, lengths = micro_batch(0)
    kwargs = {}
    if accelerator.is_main_process:
        kwargs["seq_lens"] = lengths
    with pytest.raises(ConfigurationError, match="GRU"):
        model(ids, **kwargs)


def test_arguments_by_position():
    """Positions that the caller gives are kept."""
    model = start("plain").prepare(own())
    ids, lengths = micro_batch(0)
    positions = torch.cat([torch.arange(size) for size in itertools.chain(*lengths)]).view_as(ids)
    expected = model(ids, seq_lens=lengths)
    assert torch.equal(model(ids, positions, seq_lens=lengths), expected)
    assert not torch.equal(model(ids, 2 * positions, seq_lens=lengths), expected)


@pytest.mark.parametrize("make", [own, Wrapper, RecurrentWithBounds])
def test_arguments_that_a_forward_does_not_take(make):
    """An unknown one is the forward's own error. Positions, which `pack` gives, are taken out."""
    ids, lengths = micro_batch(0)
    with pytest.raises(TypeError) as expected:
        make()(ids, unknown=1)
    model = start("plain").prepare(make())
    with pytest.raises(TypeError) as raised:
        model(ids, seq_lens=lengths, unknown=1)
    assert str(raised.value) == str(expected.value)
    positions = Documents(lengths).positions
    output = model(ids, seq_lens=lengths)
    assert torch.equal(model(ids, position_ids=positions, seq_lens=lengths), output)
    assert torch.equal(
        model(ids, position_ids=positions, cu_seqlens=None, seq_lens=lengths), output
    )


class AnyArguments(nn.Module):
    def forward(self, input_ids, seq_lens=None, **others):
        return input_ids[..., None] * 1.0, seq_lens, others


def test_a_forward_of_any_arguments_gets_them_all():
    model = start("plain").prepare(AnyArguments())
    ids, lengths = micro_batch(0)
    _, taken, others = model(ids, position_ids=ids, seq_lens=lengths)
    assert taken is lengths and others["position_ids"] is ids
    _, taken, others = model(ids, unknown=1, seq_lens=None)
    assert taken is None and others == {"unknown": 1}


@pytest.mark.parametrize("regional", [False, True])
def test_compiled(regional):
    expected = start("plain").prepare(own())
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    model = start("plain", dynamo_plugin=plugin).prepare(own())
    ids, lengths = micro_batch(0)
    for row_lengths in (lengths, [[16], [16]], [[3, 13], [8, 8]]):
        given = {"seq_lens": row_lengths}
        torch.testing.assert_close(model(ids, **given), expected(ids, **given))


def test_a_model_that_takes_bounds_gets_them():
    torch.manual_seed(0)
    model = RecurrentWithBounds()
    plain = Recurrent()
    plain.load_state_dict(model.state_dict())
    model = start("plain").prepare(model)
    ids, lengths = micro_batch(0)
    output = model(ids, seq_lens=lengths)
    expected = torch.cat([plain(document[None])[0] for document in documents_of(ids, lengths)])
    torch.testing.assert_close(output.flatten(0, 1), expected)
    torch.testing.assert_close(model(ids, **fields("cu_seqlens", lengths)), output)


def test_lengths_with_another_meaning_are_left_to_the_forward():
    """`seq_lens` are also the lengths of padded rows."""

    class Padded(nn.Module):
        def forward(self, inputs, seq_lens, cu_seqlens=None):
            self.got = seq_lens, cu_seqlens
            return inputs

    model = start("plain").prepare(Padded())
    for lengths, bounds in ((torch.tensor([7, 3, 5]), None), ([7, 3, 5], torch.tensor([0, 3]))):
        model(torch.zeros(3, 7), seq_lens=lengths, cu_seqlens=bounds)
        assert model.got[0] is lengths and model.got[1] is bounds


def test_the_comparison_leaves_no_trace():
    model = start("plain").prepare(Encoder())
    state = torch.get_rng_state()
    ids, lengths = micro_batch(0)
    model(ids, seq_lens=lengths)
    assert (model.forwards, float(model.calls)) == (1, 1)
    assert torch.equal(torch.get_rng_state(), state)
    # Not again, and not in a copy.
    copied = copy.deepcopy(model)
    for found in (model, copied):
        found(ids, seq_lens=lengths)
        assert found.forwards == 2
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_the_comparison_does_not_warn(recwarn):
    """The reentrant implementation warns without gradients."""
    model = start("plain").prepare(Encoder(recomputes=True, use_reentrant=True))
    ids, lengths = micro_batch(0)
    model(ids, seq_lens=lengths)
    assert not recwarn.list


def test_recomputed_attention_separates_documents():
    """Of two forwards in one backward, and of one that has none."""
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        accelerator = start("plain")
        model = accelerator.prepare(Encoder(recomputes=recomputes))
        outputs = []
        for number in range(3):
            ids, lengths = micro_batch(number)
            outputs.append(model(ids, seq_lens=lengths))
        accelerator.backward(outputs[0].square().sum() + outputs[1].square().sum())
        # Rows that are not packed.
        accelerator.backward(model(ids).square().sum())
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def attended(lengths, heads, causal, attend=None):
    """The output of attention, and the gradients of query, key and value: in packed rows, or by `attend` alone."""
    generator = torch.Generator().manual_seed(0)
    rows, length = len(lengths), sum(lengths[0])
    inputs = [
        torch.randn(rows, count, length, 16, generator=generator, requires_grad=True)
        for count in (4, heads, heads)
    ]
    options = {"is_causal": causal, "scale": 0.3, "enable_gqa": heads < 4}
    if attend is None:
        attention = document_attention.DocumentAttention()
        with attention.separating(Documents(lengths)):
            output = F.scaled_dot_product_attention(*inputs, **options)
    else:
        by_row = []
        for row, sizes in enumerate(lengths):
            parts = zip(*(tensor[row].split(sizes, dim=1) for tensor in inputs), strict=True)
            by_row.append(torch.cat([attend(*part, **options) for part in parts], dim=1))
        output = torch.stack(by_row)
    output.square().sum().backward()
    return output.detach(), [tensor.grad for tensor in inputs]


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "attend_by_length"),
        ({"dtype": torch.float32}, "attend_in_blocks"),
        ({"dtype": torch.float32, "shape": (2, 4, 512, 64)}, None),
        ({"dtype": torch.float32, "shape": (2, 4, 4096, 192)}, None),
        ({"dtype": torch.float32, "capability": (8, 9)}, None),
        ({"dtype": torch.float32, "heads": 2}, "attend_in_blocks"),
        ({"dtype": torch.float64}, None),
        ({"deterministic": True}, "attend_in_blocks"),
        ({"capability": (7, 5)}, None),
        ({"device": "cpu"}, None),
    ],
)
def test_kernels_of_devices(monkeypatch, changes, kernel):
    """The device and the tensors are stand-ins."""

    def tensor(device="cuda", dtype=torch.bfloat16, shape=(2, 4, 4096, 64), heads=4, **_):
        shape = (shape[0], heads, *shape[2:])
        return SimpleNamespace(
            device=SimpleNamespace(type=device), dtype=dtype, shape=shape, dim=lambda: 4
        )

    capability = changes.get("capability", (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(document_attention, "is_triton_available", lambda: True)
    is_deterministic = changes.get("deterministic", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    query = tensor(**{**changes, "heads": 4})
    found = document_attention.kernel_for(query, tensor(**changes), tensor(**changes))
    assert found is (kernel and getattr(document_attention, kernel))


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_by_length_get_documents(monkeypatch, causal):
    """What a device with flash attention computes: a stand-in for torch's kernel, which the CPU does not have."""
    longest, attend = [], F.scaled_dot_product_attention

    def varlen_attn(
        query, key, value, bounds, key_bounds, most, key_most, *, scale, window_size, enable_gqa
    ):
        assert bounds is key_bounds and most == key_most and window_size == (-1, causal - 1)
        longest.append(most)
        parts = []
        for first, last in itertools.pairwise(bounds.tolist()):
            inputs = [tensor[first:last].transpose(0, 1)[None] for tensor in (query, key, value)]
            part = attend(*inputs, is_causal=causal, scale=scale, enable_gqa=enable_gqa)
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(
        document_attention, "kernel_for", lambda *_: document_attention.attend_by_length
    )
    _, lengths = micro_batch(0)
    expected = attended(lengths, 4, causal, attend)
    torch.testing.assert_close(attended(lengths, 4, causal), expected, rtol=0, atol=1e-10)
    assert longest == [max(map(max, lengths))]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_in_blocks_get_documents(monkeypatch, causal):
    """What a device with Triton computes, from the blocks and the function of the mask.

    torch's kernel has no gradients on the CPU; its outputs are compared too.
    """
    attend = F.scaled_dot_product_attention

    def flex(query, key, value, *, block_mask, **options):
        rows, _, length, _ = query.shape
        shown = flex_attention.create_mask(block_mask.mask_mod, rows, 1, length, length, "cpu")
        blocks = block_mask.to_dense().bool()
        is_read = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)
        assert not (shown & ~is_read[..., :length, :length]).any()
        assert blocks.double().mean() < 0.8
        output = attend(query, key, value, attn_mask=shown, **options)
        inputs = [tensor.detach() for tensor in (query, key, value)]
        computed = flex_attention.flex_attention(*inputs, block_mask=block_mask, **options)
        torch.testing.assert_close(computed, output, rtol=0, atol=1e-10)
        return output

    monkeypatch.setattr(document_attention, "compiled_flex_attention", lambda: flex)
    monkeypatch.setattr(
        document_attention, "kernel_for", lambda *_: document_attention.attend_in_blocks
    )
    lengths = [[300, 100, 1, 99, 200], [128, 384, 188]]
    expected = attended(lengths, 2, causal, attend)
    torch.testing.assert_close(attended(lengths, 2, causal), expected, rtol=0, atol=1e-10)
    # Made once for all layers.
    documents = Documents(lengths)
    assert documents.block_mask(causal) is documents.block_mask(causal)


def test_labels_and_padding_of_transformers():
    """The model shifts labels itself, and the last document of a row is padding, which the mask says."""
    accelerator = start("plain")
    plain, model = of_transformers(), accelerator.prepare(of_transformers())
    ids, _ = micro_batch(0)
    lengths = [[5, 11], [7, 9]]
    mask = torch.ones_like(ids)
    mask[0, 13:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    output = model(input_ids=ids, attention_mask=mask, labels=labels, seq_lens=lengths)
    documents = [ids[0, :5], ids[0, 5:13], ids[1, :7], ids[1, 7:]]
    total = sum(
        F.cross_entropy(plain(document[None]).logits[0, :-1], document[1:], reduction="sum")
        for document in documents
    )
    torch.testing.assert_close(
        output.loss,
        total / sum(len(document) - 1 for document in documents),
        rtol=0,
        atol=1e-6,
        check_dtype=False,
    )
    assert labels[0, 5] != -100, "the caller's tensor"


@on_ranks(2)
@pytest.mark.parametrize("size", ["cp", "sp"])
def test_labels_over_ranks(size):
    accelerator = start(size)
    plain, model = of_transformers(), accelerator.prepare(of_transformers())
    ids, lengths = micro_batch(0)
    labels = ids.clone()
    expected = summed(plain, ids, lengths)
    items = int((next_tokens(ids, lengths) != -100).sum())
    if size == "sp":
        # With the loader that splits.
        whole = {"input_ids": ids, "labels": labels, "seq_lens": padded(lengths)}
        for batch in accelerator.strategy.sequence.split_loader([whole]):
            logits = model(**batch).logits
            targets = batch["shift_labels"].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / items
    else:
        with accelerator.maybe_context_parallel([ids, labels], [1, 1], {ids, labels}):
            output = model(input_ids=ids, labels=labels, seq_lens=lengths, num_items_in_batch=items)
            loss = output.loss
    loss = accelerator.reduce(loss.detach(), "sum")
    torch.testing.assert_close(loss, expected / items, rtol=0, atol=1e-6, check_dtype=False)


def test_flash_attention_gets_bounds():
    """As models of transformers with a flash implementation take them."""
    model = start("plain").prepare(of_transformers())
    ids, lengths = micro_batch(0)
    model(ids, seq_lens=lengths)
    seen = {}
    model.config._attn_implementation = "flash_attention_2"
    model.model.forward = lambda *args, **options: seen.update(options) or (args, options)
    with pytest.raises(Exception):  # noqa: B017
        model(ids, seq_lens=lengths)
    bounds = fields("cu_seqlens", lengths)["cu_seqlens"]
    assert torch.equal(seen["cu_seq_lens_q"], bounds)
    assert torch.equal(seen["cu_seq_lens_k"], bounds)
    assert seen["max_length_q"] == seen["max_length_k"] == max(map(max, lengths))
    assert seen["attention_mask"] is None


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"seq_lens": [[5, 8], [16]]}, "seq_lens.*row 0.*13 tokens.*16"),
        ({"seq_lens": [[16], [0, 16]]}, r"seq_lens.*row 1.*\[0, 16\]"),
        ({"seq_lens": torch.tensor([[16, 0], [0, 16]])}, "seq_lens.*row 1"),
        ({"seq_lens": [[16]]}, "seq_lens.*1 rows.*2"),
        ({"seq_lens": [16, 16]}, "seq_lens"),
        ({"cu_seqlens": torch.tensor([0, 5, 32])}, "cu_seqlens.*row 0"),
        ({"cu_seqlens": torch.tensor([0, 16, 16, 32])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 16])}, "cu_seqlens"),
        ({"seq_lens": ["16", "16"]}, "seq_lens.*list.*str"),
        ({"seq_lens": 16}, "seq_lens.*int"),
        ({"seq_lens": [[5.0, 11.0], [16.0]]}, "seq_lens.*float"),
        ({"seq_lens": [[True] * 16, [16]]}, "seq_lens.*bool"),
        ({"seq_lens": torch.full((2, 1, 1), 16)}, "seq_lens.*list"),
        ({"cu_seqlens": torch.tensor([0.0, 16.0, 32.0])}, "cu_seqlens.*float"),
        ({"cu_seqlens": [[0, 16], [0, 16]]}, "cu_seqlens.*list"),
        (
            {"seq_lens": [[5, 11], [16]], "cu_seqlens": torch.tensor([0, 7, 16, 32])},
            "seq_lens.*cu_seqlens.* 5",
        ),
    ],
)
def test_lengths_that_do_not_fit(lengths, message):
    model = start("plain").prepare(own())
    with pytest.raises(ConfigurationError, match=message):
        model(micro_batch(0)[0], **lengths)


@on_ranks(2)
def test_a_pipeline_refuses_packed_rows():
    reset_states()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    model = accelerator.prepare(own())
    ids, lengths = micro_batch(0)
    with pytest.raises(ConfigurationError, match=r"seq_lens.*pipeline"):
        model(ids, seq_lens=lengths)
