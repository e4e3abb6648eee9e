# SPDX-License-Identifier: Apache-2.0
"""Two ranks: what mixes a sequence beside attention is named in the first forward; what does not is trained."""

import re

import pytest
import torch
import torch.nn.functional as F
from layouts import compare_state
from rank_pool import on_ranks
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import ConfigurationError
from accelerate.parallelism_config import ParallelismConfig

transformers = pytest.importorskip("transformers")
PRELOADED = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "roberta"))

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 96, 12, 32
pytestmark = pytest.mark.usefixtures("float64")
everywhere = pytest.mark.parametrize("size", ["cp_size", "sp_size"])


class Attention(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.inputs, self.out, self.heads = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            heads,
        )

    def forward(self, x):
        parts = self.inputs(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(3, WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Function(nn.Module):
    """A function of (batch, rows, width), after a layer."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.linear(x))


def shifted(x):
    return (x + F.pad(x[:, :-1], (0, 0, 1, 0))) / 2


def attend_to_others(x):
    """Attention to a sequence that is not split."""
    others = torch.linspace(0, 1, 7 * WIDTH).view(1, 1, 7, WIDTH)
    return F.scaled_dot_product_attention(x[:, None], others, others)[:, 0]


class Drop(nn.Module):
    """Draws and counts in training only; keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.dropout, self.calls, self.losses = nn.Dropout(0.5), 0, []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.losses.append(x.detach().mean())
        self.seen += 1
        return self.dropout(x)


class Router(nn.Module):
    """Two experts, each of which computes the tokens that choose it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                out[mask] = expert(x[mask])
        return out * weights.unsqueeze(-1)


class Model(nn.Module):
    def __init__(self, mixer=None, head=None, returns=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = Attention()
        self.mixer = mixer() if mixer else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.pool, self.returns = head or (lambda x: x), returns or (lambda x, y: x)

    def forward(self, ids, labels=None, position_ids=None):
        x = self.embed(ids)
        x = x + self.attention(x)
        x = x + self.mixer(x)
        return self.returns(self.head(self.pool(self.norm(x))), labels)


def batch(seed=0):
    torch.manual_seed(seed)
    return torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(5, (BATCH, LENGTH))


def first_forward(accelerator, model, mode=True):
    model = accelerator.prepare(model).train(mode)
    ids, labels = batch()
    inputs = {"labels": labels} if isinstance(model, Model) else {}
    with accelerator.maybe_context_parallel([ids, labels], [1, 1]):
        return model(ids, **inputs)


MIXERS = {
    "conv": (Convolution, r"output of mixer\.conv \(Conv1d\)"),
    "lstm": (Lstm, r"output of mixer\.lstm \(LSTM\)"),
    "norm": (Norm, r"output of mixer\.norm \(GroupNorm\)"),
    "cumsum": (lambda: Function(lambda x: x.cumsum(1)), r"output of mixer \(Function\)"),
    "shift": (lambda: Function(shifted), r"output of mixer \(Function\)"),
    "attention": (lambda: Function(lambda x: (x @ x.mT).softmax(-1) @ x), r"mixer \(Function\)"),
}  # fmt: skip
HEADS = {
    "first": lambda x: x[:, 0],
    "last": lambda x: x[:, -1],
    "mean": lambda x: x.mean(1),
}


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
}


def small(kind, config, **options):
    options = {**SMALL, "num_attention_heads": 2, "pad_token_id": 0, "num_labels": 3, **options}
    return getattr(transformers, kind)(getattr(transformers, config)(**options))


MODELS = {
    "classification": ("LlamaForSequenceClassification", "LlamaConfig", {}),
    "eager": ("LlamaForCausalLM", "LlamaConfig", {"attn_implementation": "eager"}),
    "positions": ("RobertaForMaskedLM", "RobertaConfig", {}),
}
NAMED = {
    "classification": "output of LlamaForSequenceClassification",
    "eager": r"what model\.layers\.0\.self_attn \(LlamaAttention\) passes",
    "positions": r"roberta\.embeddings",
}


def refusal(accelerator, model, mode=True):
    with pytest.raises(ConfigurationError) as caught:
        first_forward(accelerator, model, mode)
    return str(caught.value)


@on_ranks(2)
@everywhere
def test_what_mixes_a_sequence_is_named(size):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**{size: 2}))
    for what, (mixer, named) in MIXERS.items():
        for mode in (True, False):
            text = refusal(accelerator, Model(mixer), mode)
            assert re.search(named, text) and f"{size}=2" in text, f"{what}: {text}"
    for what, head in HEADS.items():
        text = refusal(accelerator, Model(head=head))
        assert re.search(r"what Model passes to head \(Linear\)", text), f"{what}: {text}"
    # The loss alone tells nothing: what it is computed from does.
    text = refusal(accelerator, Model(head=HEADS["mean"], returns=lambda x, y: x.square().mean()))
    assert "Model passes to head" in text
    zero = Model(head=HEADS["last"])
    nn.init.zeros_(zero.head.weight), nn.init.zeros_(zero.head.bias)
    assert "Model passes to head" in refusal(accelerator, zero)
    for what, (kind, config, options) in MODELS.items():
        text = refusal(accelerator, small(kind, config, **options))
        assert re.search(NAMED[what], text), f"{what}: {text}"
    # What the root computes after its last layer.
    assert "output of Model" in refusal(accelerator, Model(returns=lambda x, y: x.mean(1)))
    assert "output of Model" in refusal(accelerator, Model(returns=lambda x, y: x[:, 2:]))


def per_sample(x, labels):
    return F.cross_entropy(x.mT, labels, reduction="none").mean(1)


RIGHT = {
    "per token": {},
    "experts": {"mixer": Router},
    "dropped": {"mixer": Drop},
    "another sequence": {"mixer": lambda: Function(attend_to_others)},
    "rms": {"mixer": lambda: nn.RMSNorm(WIDTH)},
    "always random": {"mixer": lambda: Function(lambda x: F.dropout(x, 0.1))},
    "flat": {"returns": lambda x, y: x.flatten(0, 1)},
    "loss": {"returns": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten())},
    "losses": {"returns": per_sample},
    "selected": {"returns": lambda x, y: x[y > 1]},
    "statistic": {"returns": lambda x, y: (x, x.mean((0, 1)))},
    "own table": {"mixer": lambda: Function(lambda x: x + torch.ones(LENGTH // 2, WIDTH))},
}


def train(model, optimizer, accelerator=None, steps=2):
    """A loop over batches; its parameters are those of the loop without layouts."""
    for step in range(steps):
        ids, labels = batch(step)
        if accelerator is None:
            F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        else:
            with accelerator.maybe_context_parallel([ids, labels], [1, 1]):
                loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
                accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
@everywhere
def test_what_does_not_mix_trains_as_alone(size):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**{size: 2}))
    for options in RIGHT.values():
        first_forward(accelerator, Model(**options))
    first_forward(accelerator, nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, 1)))
    for mixer in (None, Router, lambda: Function(attend_to_others)):
        plain, model = Model(mixer), Model(mixer)
        train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        train(model, optimizer, accelerator)
        compare_state(accelerator, model, plain.state_dict(), 1e-8)
    # Random numbers, buffers, counters and modes are those of one forward.
    model = accelerator.prepare(Model(Drop))
    plain = accelerator.unwrap_model(model)
    plain.norm.eval()
    ids, labels = batch()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        with accelerator.maybe_context_parallel([ids, labels], [1, 1]):
            results.append((model(ids), torch.get_rng_state()))
        assert plain.mixer.calls == len(plain.mixer.losses) == plain.mixer.seen == len(results)
        assert plain.training and plain.mixer.dropout.training and not plain.norm.training
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
