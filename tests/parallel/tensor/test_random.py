# SPDX-License-Identifier: Apache-2.0
"""Dropout in split layers. Ranks drop apart where they hold parts, alike elsewhere, and as one process."""

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.config.parallel import TorchTensorParallelConfig
from accelerate.config.training import TorchDynamoPlugin
from accelerate.core.errors import PrepareError
from accelerate.parallel.pipeline.remote_tensor import first_remote
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import is_torch_version, set_seed

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 16, 4, 12, 8, 4
PRELOADED = ("transformers.models.llama.modeling_llama",)
pytestmark = pytest.mark.usefixtures("float64")
along_or_not = pytest.mark.parametrize("along", [False, True], ids=["whole", "along the sequence"])
# Where a module stands -> whether its ranks hold parts, without and with a split sequence.
PLACES = {"drop": (False, False), "inside": (True, True), "behind": (False, True)}


class Attention(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.num_heads, self.recompute = HEADS, ""
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inside = nn.Dropout(rate)

    def attend(self, q, k, v):
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return (self.inside(scores) @ v).transpose(1, 2).flatten(2)

    def attend_and_sum(self, q, k, v):
        return self.o_proj(self.attend(q, k, v))

    def forward(self, x):
        heads = (part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.columns())
        if self.recompute == "rows":
            return checkpoint(self.attend_and_sum, *heads, use_reentrant=False)
        if self.recompute == "core":
            return self.o_proj(checkpoint(self.attend, *heads, use_reentrant=False))
        return self.attend_and_sum(*heads)

    def columns(self):
        return self.q_proj, self.k_proj, self.v_proj


class Mlp(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inside = nn.Dropout(rate)

    def forward(self, x):
        return self.down_proj(self.inside(self.up_proj(x).tanh()))


class Block(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(rate), Mlp(rate)
        self.behind = nn.Dropout(rate)

    def forward(self, x):
        x = x + self.behind(self.attention(self.norms[0](x)))
        return x + self.behind(self.mlp(self.norms[1](x)))


class Model(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.recompute = ""
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.drop = nn.Dropout(rate)
        self.layers = nn.ModuleList(Block(rate) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.drop(self.embedding(tokens))
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = layer(x)
        return self.head(self.drop(self.norm(x)))


def accelerated(along, dynamo=None, plugin=None, **sizes):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    layout = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(sequence_parallel=along), **sizes)
    return Accelerator(cpu=True, parallelism_config=layout, dynamo_plugin=dynamo, fsdp_plugin=plugin)


def prepared(along, rate=0.25, dynamo=None):
    accelerator = accelerated(along, dynamo)
    set_seed(0)
    model = Model(rate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.randint(VOCABULARY, (40 * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(rows, BATCH))


def train(accelerator, model, optimizer, batches):
    for rows in batches:
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(getattr(logits, "logits", logits).flatten(0, 1), rows[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def of_ranks(tensor):
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_alike(what, tensor):
    mine, others = of_ranks(tensor.detach())
    assert torch.equal(mine, others), f"{what}: ranks differ"


def check_whole(model):
    """Parameters that each rank has whole, and the stream of random numbers, are the same bits on both."""
    names = []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.placements[0].is_replicate():
            assert_alike(name, local(parameter))
            names.append(name)
    assert any("norm" in name for name in names)
    assert_alike("the generator", torch.get_rng_state())


@on_ranks(2)
@along_or_not
def test_masks(along):
    _, model, _, loader = prepared(along)
    seen = []

    def watch(name):
        def hook(module, args, output):
            seen.append((name.rpartition(".")[2], (local(output) == 0) & (local(args[0]) != 0)))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(watch(name))
    rows = next(iter(loader))
    for _ in range(2):
        model(rows[:, :-1])
        assert_alike("the generator", torch.get_rng_state())
    assert len(seen) == 2 * (2 + 2 * 4)
    found = {}
    for number, (place, mask) in enumerate(seen):
        mine, others = of_ranks(mask)
        assert 0.1 < mask.double().mean() < 0.4, "a quarter is to be dropped"
        assert torch.equal(mine, others) is not PLACES[place][along], f"{place}: wrong on {number}"
        found.setdefault((place, mask.shape), []).append(mask)
    for (place, _), masks in found.items():
        for at, mask in enumerate(masks):
            assert not any(torch.equal(mask, other) for other in masks[:at]), f"{place}: a mask came twice"
    # Nothing is drawn in evaluation, and nothing moves.
    before, _ = torch.get_rng_state(), model.eval()
    with torch.no_grad():
        assert torch.equal(model(rows[:, :-1]), model(rows[:, :-1]))
    assert torch.equal(torch.get_rng_state(), before)


@on_ranks(2)
def test_exception():
    _, model, _, loader = prepared(along=False)
    rows, before = next(iter(loader))[:, :-1], torch.get_rng_state()
    failing = model.layers[1].mlp.inside.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows)
    failing.remove()
    assert_alike("the generator after an exception", torch.get_rng_state())
    assert torch.initial_seed() == 0 and not torch.equal(torch.get_rng_state(), before)


def gradients(model, rows):
    model.zero_grad()
    set_seed(3)
    model(rows).square().mean().backward()
    return {name: local(parameter.grad) for name, parameter in model.named_parameters()}, torch.get_rng_state()


@on_ranks(2)
@along_or_not
def test_recompute(along):
    _, model, _, loader = prepared(along)
    rows = next(iter(loader))[:, :-1]
    expected = gradients(model, rows)
    for kind in ("block", "reentrant", "core"):
        model.recompute = "" if kind == "core" else kind
        for layer in model.layers:
            layer.attention.recompute = kind if kind == "core" else ""
        found = gradients(model, rows)
        assert found[0].keys() == expected[0].keys()
        for name, grad in found[0].items():
            assert torch.equal(grad, expected[0][name]), f"recomputed by {kind}: {name}"
        assert torch.equal(found[1], expected[1]), f"recomputed by {kind}: the stream moved"
    if not along:
        for layer in model.layers:
            layer.attention.recompute = "rows"
        with pytest.raises(PrepareError, match="Checkpoint all of them"):
            gradients(model, rows)
        set_seed(0)


@on_ranks(2)
@along_or_not
def test_training(along, tmp_path):
    """20 steps, saved after 10: what is resumed from there, in a run that drew otherwise, is the same bits."""
    accelerator, model, optimizer, loader = prepared(along)
    batches = list(loader)[:20]
    train(accelerator, model, optimizer, batches[:10])
    accelerator.save_state(tmp_path)
    train(accelerator, model, optimizer, batches[10:])
    check_whole(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator, model, optimizer, _ = prepared(along)
    set_seed(7)
    accelerator.load_state(tmp_path)
    train(accelerator, model, optimizer, batches[10:])
    for name, value in model.state_dict().items():
        assert torch.equal(local(value), local(expected[name])), f"resumed: {name}"


@on_ranks(2)
@along_or_not
def test_no_dropout(along):
    """Nothing is switched, and no hook is there to ask."""
    _, model, _, loader = prepared(along, rate=0.0)
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert not [hook for hook in hooks if hook.__module__.endswith("parallel.tensor.random")]
    rows = next(iter(loader))[:, :-1]
    before = torch.get_rng_state()
    model(rows)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.thorough
@on_ranks(2)
def test_distribution():
    """Of dropout between a layer split by columns and one split by rows: the mean and the variance of one process."""
    rate, draws = 0.5, 4000
    _, model, _, _ = prepared(along=False, rate=rate)
    mlp = model.layers[0].mlp
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        outputs = torch.stack([mlp(x) for _ in range(draws)])
        whole = mlp.eval()(x)
        hidden, weight = mlp.up_proj(x).tanh(), mlp.down_proj.weight.to_local()
        variance = rate / (1 - rate) * (weight * hidden).square().sum(-1)
    dist.all_reduce(variance)
    deviations = (outputs.mean(0) - whole) / (variance / draws).sqrt()
    assert deviations.abs().max() < 4, deviations
    # Masks that repeat would correlate the parts: the variance of their sum would be another.
    ratio = outputs.var(0) / variance
    assert (ratio - 1).abs().max() < 6 * (2 / draws) ** 0.5, ratio


@on_ranks(2)
@pytest.mark.parametrize(
    "along", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["whole", "along the sequence"]
)
def test_compiled(along):
    def weights(dynamo):
        torch._dynamo.reset()
        accelerator, model, optimizer, loader = prepared(along, dynamo=dynamo)
        train(accelerator, model, optimizer, list(loader)[:3])
        check_whole(model)
        return [local(parameter) for parameter in model.parameters()]

    options = TorchDynamoPlugin(backend="eager", use_regional_compilation=not along)
    if is_torch_version("<", "2.12"):
        with pytest.raises(PrepareError, match=r"wrong gradients .* torch 2\.12"):
            weights(options)
        return
    expected, found = weights(None), weights(options)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), "compiled"


@on_ranks(2)
def test_transformers(tmp_path):
    """Its attention draws; nothing else of it does, and nothing else is switched. Also as it splits models itself."""
    transformers = pytest.importorskip("transformers")
    from transformers.distributed import DistributedConfig

    transformers.logging.set_verbosity_error()
    rows = torch.randint(VOCABULARY, (3 * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=2, attention_dropout=0.3, attn_implementation="sdpa",
    )  # fmt: skip
    once = None
    for how in ("whole", "recomputed", "split"):
        accelerator = accelerated(along=False)
        set_seed(0)
        model = transformers.LlamaForCausalLM(config).double()
        if how == "recomputed":
            model.gradient_checkpointing_enable()
        if how == "split":
            if accelerator.is_main_process:
                model.save_pretrained(tmp_path)
            accelerator.wait_for_everyone()
            parts = DistributedConfig(tp_size=2)
            model = transformers.LlamaForCausalLM.from_pretrained(
                tmp_path, dtype=torch.float64, distributed_config=parts, attention_dropout=0.3
            ).train()
            set_seed(0)
            transformers.LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, BATCH))
        switched = [name for name, one in model.named_modules() if one._forward_hooks_always_called]
        assert switched == [f"model.layers.{layer}.self_attn" for layer in range(2)], (how, switched)
        train(accelerator, model, optimizer, loader)
        check_whole(model)
        found = local(model.model.layers[0].self_attn.o_proj.weight).clone()
        assert once is None or torch.allclose(found, once, rtol=0, atol=1e-12), how
        once = found


def composed(watch=None, plugin=None, **sizes):
    accelerator = accelerated(False, None, plugin, **sizes)
    set_seed(0, device_specific=True)
    model = Model(0.25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.randint(VOCABULARY, (4 * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, BATCH))

    def note(name, output):
        # Before its own units a stage has no content, and draws nothing.
        if first_remote([output]) is None:
            watch.append((name, output == 0))

    for name, module in model.named_modules():
        if watch is not None and isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *given, name=name: note(name, given[2]))
    train(accelerator, model, optimizer, loader)
    return accelerator, [local(parameter) for parameter in model.parameters()]


@on_ranks(thorough=[4])
def test_recomputed_under_fsdp2():
    options = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    kept, again = (
        composed(
            plugin=FullyShardedDataParallelPlugin(
                **options, transformer_cls_names_to_wrap=["Block"], activation_checkpointing=recompute
            ),
            dp_shard_size=2,
        )[1]
        for recompute in (False, True)
    )
    assert all(torch.equal(*pair) for pair in zip(kept, again, strict=True)), "recomputed under FSDP2"


@on_ranks(thorough=[4])
def test_each_stage_of_a_pipeline_draws_from_its_own_stream():
    seen = []
    accelerator, _ = composed(seen, pp_size=2)
    told = [None, None]
    state = torch.get_rng_state()
    dist.all_gather_object(told, (seen, state), group=accelerator.torch_device_mesh["tp"].get_group())
    assert torch.equal(told[0][1], told[1][1])
    assert len(seen) >= 4 * (1 + 4)
    for (name, mine), (_, others) in zip(told[0][0], told[1][0], strict=True):
        assert torch.equal(mine, others) is not name.endswith("inside"), f"in a pipeline: {name}"
