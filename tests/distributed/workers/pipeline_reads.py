# SPDX-License-Identifier: Apache-2.0
"""Each rank: models that read weights of other stages, in a pipeline, against the plain loop to 1e-8 in float64."""

import torch
import torch.distributed as dist
from pipeline_carried import bart
from pipeline_parity import GLOBAL_BATCH, VOCABULARY, Options, Plugin, accelerator, batches, check_run, own, refused
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate.state import PartialState

WIDTH = 16


class Reading(nn.Module):
    """Reads before its blocks, in them and behind them what stands elsewhere, beside parameters of its own."""

    def __init__(self, seed=0, kinds=("before", "inside", "tied", "root", "lists"), reentrant=None):
        super().__init__()
        torch.manual_seed(seed)
        self.kinds, self.reentrant = kinds, reentrant
        self.root = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(WIDTH))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        # Not registered a second time: the last block reads the weight of the first.
        self.blocks[3].__dict__["other"] = self.blocks[0]
        self.head = None if "tied" in kinds else nn.Linear(WIDTH, VOCABULARY)
        self.relative = nn.Embedding(4, WIDTH)
        self.biases = nn.ParameterList(torch.randn(WIDTH) for _ in range(4))
        self.scales = nn.ParameterDict({"last": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, tokens):
        x = self.embed(tokens)
        if "before" in self.kinds:
            x = x + self.relative.weight[1] * self.blocks[2].table
        for number, block in enumerate(self.blocks):
            if "root" in self.kinds and number in (1, 3):
                x = x + self.root
            if "lists" in self.kinds:
                x = x * self.biases[number]
            inside = "inside" in self.kinds
            if self.reentrant is None:
                x = block(x, inside)
            else:
                x = checkpoint(block, x, inside, use_reentrant=self.reentrant)
        if "lists" in self.kinds:
            x = x + self.scales["last"]
        return nn.functional.linear(x, self.embed.weight) if "tied" in self.kinds else self.head(x)


class Block(nn.Module):
    other = None

    def __init__(self):
        super().__init__()
        self.linear, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.register_buffer("table", torch.randn(WIDTH))

    def forward(self, x, inside):
        x = torch.tanh(self.second(self.linear(x))).chunk(2, -1)[0]
        return x if self.other is None or not inside else x + nn.functional.linear(x, self.other.linear.weight)


def deberta(seed=0):
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    torch.manual_seed(seed)
    config = DebertaV2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4, max_relative_positions=8,
        norm_rel_ebd="layer_norm", share_att_key=True,
    )  # fmt: skip
    return DebertaV2ForMaskedLM(config).to(torch.float64)


def check_refusals():
    tokens, _ = next(iter(batches(1, False)))
    call = lambda model: model(tokens)  # noqa: E731
    for kind, name in (
        ("before", "relative.weight"),
        ("inside", "blocks.0.linear.weight"),
        ("tied", "embed.weight"),
    ):
        refused(kind, lambda kind=kind: Reading(kinds=(kind,)), Options(num_microbatches=2), name, call)
    cure = "This fits: PipelineParallelConfig(example_inputs={...})"
    refused("cure", lambda: Reading(kinds=("tied",)), Options(num_microbatches=2), cure, call)
    again = lambda: Reading(kinds=(), reentrant=True)  # noqa: E731
    refused(
        "reentrant", again, Options(num_microbatches=2), "inside of an autograd function (CheckpointFunction", call
    )


def check_weights(schedule):
    """Three micro-batches of unequal numbers of labels: the weights of a schedule are not rounded."""
    tokens, labels = next(iter(batches(1, True)))
    tokens, labels = tokens[: GLOBAL_BATCH - 2], labels[: GLOBAL_BATCH - 2]
    plain = own()
    plain(tokens, labels=labels)[0].backward()
    run = accelerator(Options(schedule=schedule, num_microbatches=3), pp_size=2)
    model = own(dist.get_rank())
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(2):
        # The second batch runs in the schedule.
        optimizer.step()
        optimizer.zero_grad()
        run.backward(model(tokens, labels=labels)[0], num_items=(labels != -100).sum())
    assert model._pipelined.scheduled._built
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def main():
    ranks = PartialState(cpu=True).num_processes
    torch.set_default_dtype(torch.float64)
    tokens, _ = next(iter(batches(1, False)))
    seen = Options(num_microbatches=2, example_inputs={"tokens": tokens})
    check_run("reads that were seen", Reading, seen, 4, pp_size=ranks)
    unseen = lambda seed=0: Reading(seed, ("root", "lists"))  # noqa: E731
    check_run("parameters of the root, not seen", unseen, Options(num_microbatches=2), 4, pp_size=ranks)
    if ranks == 4:
        check_run("reads, copies", Reading, seen, 4, pp_size=2, dp_replicate_size=2)
        plugin = Plugin(
            fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
        )
        check_run("reads, shards", Reading, seen, 4, plugin=plugin, pp_size=2, dp_shard_size=2)
    for what, make in (("DeBERTa", deberta), ("BART", bart)):
        inside = {"inside": True, "padded": True, "steps": 4}
        check_run(what, make, Options(schedule="1f1b", num_microbatches=4), pp_size=ranks, **inside)
    if ranks == 2:
        check_run("computed again", lambda seed=0: Reading(seed, (), False), Options(num_microbatches=2), 2, pp_size=2)
        check_refusals()
        for schedule in ("1f1b", "interleaved"):
            check_weights(schedule)
    print("all equal")


if __name__ == "__main__":
    main()
