# SPDX-License-Identifier: Apache-2.0
"""A pipeline of two ranks: precision, evaluation, weights, losses, order of execution, refusals."""

import copy

import pytest
import torch
import torch.distributed as dist
from layouts import compare
from pipelines import GLOBAL_BATCH, VOCABULARY, batches, check_run, own, refused
from rank_pool import on_ranks
from states import all_ranks, reset_states
from torch import nn

from accelerate import Accelerator
from accelerate.config.parallel import PipelineParallelConfig as Options
from accelerate.core.errors import AccelerateError, PrepareError
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DataLoaderConfiguration

TOKENS, LABELS = next(iter(batches(1, False)))
PRELOADED = ("transformers.models.gpt2.modeling_gpt2",)
pytestmark = pytest.mark.usefixtures("float64")


def prepared(model, options=None, **arguments):
    reset_states()
    layout = ParallelismConfig(pp_size=2, pp_handler=options or Options(num_microbatches=4))
    run = Accelerator(cpu=True, parallelism_config=layout, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return run, *run.prepare(model, optimizer)


def gpt2(seed=0):
    """Tied embeddings, positions and biases of its own, and a loss that shifts its labels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(torch.float64)


@on_ranks(2)
def test_gpt2():
    PartialState(cpu=True)
    plain = gpt2()
    run, model, _ = prepared(gpt2(dist.get_rank()))
    mask = torch.ones_like(TOKENS)
    mask[:3, -2:] = 0
    labels = TOKENS.masked_fill(mask == 0, -100)
    # Of no sample: it stays whole in every micro-batch.
    positions = torch.arange(TOKENS.shape[1]).flip(0)[None]
    expected = plain(TOKENS, attention_mask=mask, position_ids=positions, labels=labels)
    output = model(TOKENS, attention_mask=mask, position_ids=positions, labels=labels)
    assert type(output) is type(expected) and abs(output.loss - expected.loss) < 1e-6
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-10)
    expected.loss.backward()
    run.backward(output.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, plain.get_parameter(name).grad, rtol=0, atol=1e-7
        )
    norm = run.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(
        norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=0, atol=1e-7
    )
    assert (
        "wte" not in dict(model.transformer.h[0].named_parameters()) and not model.config.use_cache
    )
    held = {name for name, _ in model.named_parameters()}
    # The tied embedding is on both ends, under its one name.
    assert "transformer.wte.weight" in held and "lm_head.weight" not in held


@on_ranks(2)
def test_evaluation():
    PartialState(cpu=True)
    plain = own()
    run, model, _ = prepared(own(dist.get_rank()))
    model.eval()
    for rows in (GLOBAL_BATCH, 5, 3):
        with torch.no_grad():
            torch.testing.assert_close(
                model(TOKENS[:rows]), plain(TOKENS[:rows]), rtol=0, atol=1e-12
            )
            positions = torch.arange(TOKENS.shape[1]).expand(rows, -1).flip(1)
            given = model(TOKENS[:rows], position_ids=positions)
            torch.testing.assert_close(given, plain(TOKENS[:rows], positions), rtol=0, atol=1e-12)
    with torch.inference_mode():
        torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=1e-12)
    # All ranks of the pipeline read the same samples: they count once.
    told = "messages of model: Llama, for this rank in one optimizer step"
    name = (
        "activations to the next stage" if dist.get_rank() == 0 else "gradients to the former stage"
    )
    sent = f"4 messages, {GLOBAL_BATCH * TOKENS.shape[1] * 16 * 8 / 1024:.2f} KiB"
    assert "unknown" in run.explain().find(told, "tensors between stages")
    model.train()
    model(TOKENS)
    assert run.explain().find(told, name) == sent
    model.eval()
    assert run.gather_for_metrics(TOKENS).shape == TOKENS.shape
    model.train()
    # A last batch of another size, divided unevenly.
    for rows in (GLOBAL_BATCH, 7, 2):
        loss = nn.functional.cross_entropy(
            model(TOKENS[:rows]).flatten(0, 1), LABELS[:rows].flatten()
        )
        run.backward(loss)
        nn.functional.cross_entropy(
            plain(TOKENS[:rows]).flatten(0, 1), LABELS[:rows].flatten()
        ).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, plain.get_parameter(name).grad, rtol=0, atol=1e-12
        )


@on_ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision(precision):
    PartialState(cpu=True)
    run, model, optimizer = prepared(own().float(), mixed_precision=precision)
    losses = []
    for _ in range(3):
        logits = model(TOKENS)
        assert logits.dtype == torch.float32
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
        run.backward(loss)
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0] and len(set(all_ranks(losses[2]))) == 1, losses
    if precision == "bf16":
        return
    # An overflow on one stage leaves the step out on both.
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), LABELS.flatten())
    run.backward(loss)
    if dist.get_rank() == 1:
        next(iter(model.parameters())).grad[0] = float("inf")
    optimizer.step()
    assert all_ranks(run.optimizer_step_was_skipped) == [True, True]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(set(all_ranks(run.scaler.get_scale()))) == 1


@on_ranks(2)
def test_weights():
    """From rank 0 alone, from nowhere, and out of a plain run's state."""
    PartialState(cpu=True)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = own()
    run, model, _ = prepared(model)
    compare(run.prepared_model(model).state_dict(), own().state_dict())
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    with torch.device("meta"):
        model = own()
    run, model, optimizer = prepared(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert model.layers[0].mlp.up_proj.weight.shape == (32, 16)
    held = [
        name for name, parameter in model.named_parameters() if parameter.untyped_storage().nbytes()
    ]
    assert sorted(name for part in all_ranks(held) for name in part) == sorted(
        n for n, _ in own().named_parameters()
    )
    assert torch.isfinite(model(TOKENS)).all()
    plain = own(5)
    run.prepared_model(model).load_state_dict(plain.state_dict() if dist.get_rank() == 0 else {})
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=1e-12)


@on_ranks(2)
def test_losses():
    """A loss function of the user's in the schedule; a loss alone; two outputs in one backward."""
    PartialState(cpu=True)
    plain = own()

    def loss_fn(logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    class Silent(nn.Module):
        """A model that takes no labels."""

        def __init__(self, seed=0):
            super().__init__()
            self.inner = own(seed)

        def forward(self, tokens):
            return self.inner(tokens)

    options = Options(schedule="1f1b", num_microbatches=4, loss_fn=loss_fn, loss_reduction="mean")
    run, model, _ = prepared(Silent(dist.get_rank()), options)
    for _ in range(3):
        loss, logits = model(TOKENS, labels=LABELS)
        run.backward(loss)
        expected = loss_fn(plain(TOKENS), LABELS)
        expected.backward()
        assert abs(loss - expected) < 1e-10 and logits.shape == (*TOKENS.shape, VOCABULARY)
    assert run.prepared_model(model).stages.runner._built
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.inner.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=0, atol=1e-12)
    loss, logits = model(TOKENS, labels=LABELS)
    with pytest.raises(AccelerateError, match="use schedule='gpipe'"):
        run.backward(loss + logits.square().mean())
    run, model, _ = prepared(own(dist.get_rank()), Options(num_microbatches=2, gather_output=False))
    loss, nothing = model(TOKENS, labels=LABELS)
    assert nothing is None and abs(loss - loss_fn(own()(TOKENS), LABELS)) < 1e-10
    plain.zero_grad()
    run, model, _ = prepared(own(dist.get_rank()))
    for net in (plain, model):
        loss = loss_fn(net(TOKENS[:4]), LABELS[:4]) * loss_fn(net(TOKENS[4:]), LABELS[4:])
        run.backward(loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, plain.get_parameter(name).grad, rtol=0, atol=1e-12
        )
    with pytest.raises((AccelerateError, RuntimeError), match="second time"):
        run.backward(loss)


class Chain(nn.Module):
    """Blocks with a dropout; what stands beside them is chosen."""

    def __init__(self, skip=False, norm_first=False):
        super().__init__()
        self.skip = skip
        self.embed = nn.Linear(4, 8)
        if norm_first:
            self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)
        )
        if not norm_first:
            self.norm = nn.LayerNorm(8)

    def forward(self, x):
        first = x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x + first if self.skip else x)


@on_ranks(2)
def test_random():
    """A stage draws from a stream of its own: the run's does not move, and the same seed gives the same."""
    PartialState(cpu=True)
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        _, model, _ = prepared(Chain())
        torch.manual_seed(3)
        x = torch.randn(8, 4)
        before = torch.get_rng_state()
        outputs.append([model(x), model(x)])
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(outputs[0][0], outputs[1][0]) and not torch.equal(
        outputs[0][0], outputs[0][1]
    )


class Packing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(size, 4, batch_first=True) for size in (1, 4, 4, 4))

    def forward(self, x):
        x = nn.utils.rnn.pack_padded_sequence(x, [4] * len(x), batch_first=True)
        for block in self.blocks:
            x = block(x)[0]
        return nn.utils.rnn.pad_packed_sequence(x, batch_first=True)[0]


def refusals():
    """What is prepared, the options, what the error has in it, what is done with the model, other objects."""
    four, x = (
        Options(num_microbatches=4),
        torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),
    )
    early = Options(schedule="1f1b", num_microbatches=3, loss_reduction="mean")
    # A rank that has failed has a later stage too, which is told by ranks that send no more.
    turns = Options(
        schedule="interleaved", stages_per_rank=2, num_microbatches=4, loss_reduction="mean"
    )
    inputs = Options(balance="time", example_inputs={"y": x})
    mask = Options(whole_inputs=["mask"])
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(1))])

    inside = Options(schedule="1f1b", num_microbatches=4, loss_reduction="mean")
    skipped = "uses the output of embed, which only stage 0 has. Name 'embed'"

    def forward(model):
        return model(x)

    def with_other_samples(model):
        return model(torch.full((8, 4), float(dist.get_rank())))

    return {
        "a split point": (Chain, Options(split_points=["blocks.7"]), "blocks.7"),
        "stages": (lambda: own(layers=1), four, "1 blocks"),
        "compiled": (lambda: torch.compile(Chain()), four, "dynamo_plugin"),
        "samples": (Chain, Options(num_microbatches=9), "num_microbatches=9", forward),
        "division": (own, early, "num_microbatches=3", lambda model: model(TOKENS, labels=LABELS)),
        "skip": (lambda: Chain(skip=True).eval(), four, skipped, forward),
        "order": (lambda: Chain(norm_first=True).eval(), four, "example_inputs", forward),
        "no reduction": (own, Options(schedule="1f1b", num_microbatches=4), 'loss_reduction="mean"'),
        "no loss": (Chain, inside, "call it with labels", forward),
        "other samples": (Chain, four, "got different inputs", with_other_samples),
        "other samples, in turns": (Chain, turns, "got different inputs", with_other_samples),
        "an input": (Chain, mask, "mask"),
        "example inputs": (Chain, inputs, "unexpected keyword argument 'y'"),
        "hidden states": (
            Chain, four, "output_hidden_states=True", lambda model: model(x, output_hidden_states=True),
        ),
        "packed": (
            Chain, four, "PackedSequence",
            lambda model: model(nn.utils.rnn.pack_padded_sequence(x[..., None], [4] * 8, batch_first=True)),
        ),
        "packed between blocks": (
            Packing, four, "output of blocks.0 contains a PackedSequence", lambda model: model(x[..., None]),
        ),
        "an optimizer": (Chain, four, "would not train anything", lambda model: None, foreign),
    }  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize("what", refusals())
def test_refusals(what):
    PartialState(cpu=True)
    refused(*refusals()[what])


@on_ranks(2)
def test_stages_balanced_by_time_in_the_order_observed():
    PartialState(cpu=True)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain = Chain(norm_first=True).eval()
    torch.manual_seed(0)
    options = Options(num_microbatches=2, balance="time", example_inputs={"x": x})
    run, model, _ = prepared(Chain(norm_first=True).eval(), options)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)
    assert len(set(all_ranks(run.prepared_model(model).stages.runner.cut.bounds))) == 1


class Recurrent(nn.Module):
    """LSTMs also return states, whose batch is their second dimension."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)[0]
        return self.head(x)


class WithStates(Recurrent):
    """Its head uses the states."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x, (state, _) = block(x)
        return self.head(x + state[0][:, None])


class SequenceFirst(Recurrent):
    """Between its blocks a sequence comes first, as long as a micro-batch has samples."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0) for _ in range(4))

    def forward(self, tokens):
        x = self.embed(tokens[:, :4]).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.transpose(0, 1)).repeat(1, 2, 1)


@on_ranks(2)
@pytest.mark.parametrize("make", [Recurrent, WithStates, SequenceFirst])
@pytest.mark.parametrize("count", [2, 3])
def test_blocks_whose_batch_is_another_dimension(count, make):
    """Also where micro-batches differ in size."""
    PartialState(cpu=True)
    check_run(make, Options(num_microbatches=count), steps=4, pp_size=2)


class Moving(Recurrent):
    """Moves what its blocks have computed, as code written for several devices does."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens):
        x = self.embed(tokens)
        shift = torch.ones_like(x)
        for block in self.blocks:
            x = torch.tanh(block(x).to("cpu:0")).cpu()
            x = x.to(torch.device("cpu", 0), non_blocking=True).to(shift)
            x = x + shift.to(x.device) + torch.as_tensor(x, device="cpu")
        return self.head(x.to(x.device, x.dtype))


@on_ranks(2)
def test_values_of_another_stage_are_moved():
    PartialState(cpu=True)
    check_run(Moving, Options(num_microbatches=2), steps=4, pp_size=2)


@on_ranks(2)
def test_several_forwards_and_terms_of_parameters_in_a_step():
    """In the order of the forwards and in the other; between them an evaluation, which a copy would not be."""
    run = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    model = run.prepare(copy.deepcopy(plain))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    for each, backward in ((plain, torch.Tensor.backward), (model, run.backward)):
        losses = [each(x * factor).square().mean() for factor in (1, 2, 3)]
        each.eval()
        each(x)
        each.train()
        losses.append(
            losses.pop(0) + sum(parameter.square().sum() for parameter in each.parameters())
        )
        for loss in losses:
            backward(loss)
    expected = dict(plain.named_parameters())
    assert 0 < len(list(model.parameters())) < len(expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=0, atol=1e-12)
    loss = model(x).square().mean()
    run.backward(loss, retain_graph=True)
    with pytest.raises(AccelerateError, match="add the losses"):
        run.backward(loss)
    for copied in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(PrepareError, match=r"copied with copy\.deepcopy"):
            copied(model)


@on_ranks(2)
def test_loop():
    """The whole loop: loader, accumulation, schedule, metrics."""
    PartialState(cpu=True)
    data = [(tokens, label) for tokens, label in zip(TOKENS, LABELS, strict=True)]

    def loop(run, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = torch.utils.data.DataLoader(
            data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(0)
        )
        if run is not None:
            model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
        seen = []
        for _ in range(2):
            for tokens, labels in loader:
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
                loss.backward() if run is None else run.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen.append(
                    loss.item()
                    if run is None
                    else run.gather_for_metrics(loss.detach().repeat(len(tokens)))[0].item()
                )
        return model, seen

    plain, expected = loop(None, own())
    reset_states()
    layout = ParallelismConfig(pp_size=2, pp_handler=Options(num_microbatches=2))
    run = Accelerator(
        cpu=True,
        parallelism_config=layout,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False),
    )
    model, seen = loop(run, own(dist.get_rank()))
    assert all(abs(a - b) < 1e-10 for a, b in zip(seen, expected, strict=True)), (seen, expected)
    compare(run.prepared_model(model).state_dict(), plain.state_dict())
