# SPDX-License-Identifier: Apache-2.0
"""Models that transformers shards in `from_pretrained` (`DistributedConfig`), against the plain loop."""

import pytest
import torch
import torch.nn.functional as F
from layouts import compare, compare_state
from packages import package
from rank_pool import on_ranks
from states import reset_states
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from windows import ACCUMULATION, train_by_hand

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from accelerate.state import PartialState
from accelerate.utils import is_torch_version

transformers = package("transformers")

PRELOADED = (
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.llama.modeling_llama",
)
VOCABULARY, LENGTH, BATCH, STEPS, CLIP = 16, 8, 8, 3, 0.1
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "attn_implementation": "sdpa",
}  # fmt: skip
EXPERTS = {"head_dim": 4, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
# The family, the sizes, the data shards of the ranks.
LAYOUTS = {
    "fsdp of 2": ("Llama", {"fsdp_size": 2}, (0, 1)),
    "tp of 2": ("Llama", {"tp_size": 2}, (0, 0)),
    "packed layers, tp of 2": ("Qwen3Moe", {"tp_size": 2}, (0, 0)),
    "experts of 2, tp of 2": ("Qwen3Moe", {"tp_size": 2, "ep_size": 2}, (0, 0)),
    "experts of 2, fsdp of 4": ("Qwen3Moe", {"fsdp_size": 4, "ep_size": 2}, (0, 1, 2, 3)),
    "hsdp": ("Llama", {"fsdp_size": 2, "dp_replicate_size": 2}, (0, 1, 2, 3)),
}


def config_of(family):
    options = {**SIZES, **(EXPERTS if family == "Qwen3Moe" else {})}
    # The grouped matrix product of torch has no float64.
    return getattr(transformers, f"{family}Config")(**options, experts_implementation="eager")


def batches():
    tokens = torch.randint(
        VOCABULARY, (STEPS * ACCUMULATION * BATCH, LENGTH), generator=torch.Generator()
    )
    return list(tokens)


def loss_of(model, tokens):
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_optimizer(model):
    """Norms and routers of these models are in float32: Adam would make steps of the roundings of small gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def check_run(what, folder):
    family, sizes, shards = LAYOUTS[what]
    reset_states()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    kind = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    plain = kind(config_of(family)).to(torch.float64)
    if accelerator.is_main_process:
        plain.save_pretrained(folder)
    accelerator.wait_for_everyone()
    states, norms = train_by_hand(
        plain.train(), make_optimizer(plain), DataLoader(batches(), BATCH), loss_of, CLIP
    )
    expected = states[-1]
    layout = transformers.distributed.DistributedConfig(**sizes)
    model = kind.from_pretrained(
        folder, dtype=torch.float64, distributed_config=layout, experts_implementation="eager"
    ).train()
    optimizer = make_optimizer(model)
    loader = DataLoader(batches(), BATCH // len(set(shards)))
    if "packed" in what and is_torch_version("<", "2.12"):
        with pytest.raises(PrepareError, match=r"cannot gather packed layers .* torch 2\.12"):
            accelerator.prepare(model, optimizer, loader)
        return
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.strategy.data_shard == (shards[accelerator.process_index], len(set(shards)))
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                found.append(accelerator.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            optimizer.zero_grad()
    # transformers computes norms in float32, and the router of a mixture too, which weighs the experts.
    rtol, atol = (1e-5, 1e-6) if family == "Qwen3Moe" else (1e-6, 1e-8)
    torch.testing.assert_close(found, norms, rtol=rtol, atol=0)
    accelerator.save_state(folder / "checkpoint")
    compare_state(accelerator, model, expected, atol)
    prepared = accelerator.prepared_model(model)
    momenta = prepared.prepared_optimizer(optimizer.optimizer).state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            optimizer.state[parameter]["momentum_buffer"].zero_()
    accelerator.load_state(folder / "checkpoint")
    compare_state(accelerator, model, expected, atol)
    loaded = prepared.prepared_optimizer(optimizer.optimizer).state_dict()
    if accelerator.is_main_process:
        compare(loaded["state"], momenta["state"], 0.0)


@on_ranks(2, thorough=(4,))
def test_layouts(tmp_path):
    ranks = PartialState(cpu=True).num_processes
    for what, (_, _, shards) in LAYOUTS.items():
        if len(shards) == ranks:
            check_run(what, tmp_path / what)


@on_ranks(2)
def test_experts_on_one_rank_each(tmp_path):
    """Their gradients have a divisor."""
    accelerator = Accelerator(cpu=True)
    kind = transformers.Qwen3MoeForCausalLM
    if accelerator.is_main_process:
        kind(config_of("Qwen3Moe")).save_pretrained(tmp_path)
    accelerator.wait_for_everyone()
    layout = transformers.distributed.DistributedConfig(fsdp_size=2, ep_size=2)
    options = {"distributed_config": layout, "experts_implementation": "eager"}
    model = accelerator.prepare(
        kind.from_pretrained(tmp_path, dtype=torch.float32, **options).train()
    )
    plain = kind.from_pretrained(
        tmp_path, dtype=torch.float32, experts_implementation="eager"
    ).train()
    tokens = torch.stack(batches()[:BATCH])
    loss_of(plain, tokens).backward()
    accelerator.backward(loss_of(model, tokens.chunk(2)[accelerator.process_index]))
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor()
        torch.testing.assert_close(grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=name)
