# SPDX-License-Identifier: Apache-2.0
"""The questions of `accelerate config`: a table, asked in order, each only where it matters, with a way back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import launch_file
from ...config.launch import options
from ...config.launch_schema import cluster_keys
from ...core import system
from . import menu
from .default import machine_defaults, run_kind

Answers = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One question. key: where the answer goes in the file (dotted), or a name of its own beginning with `_`."""

    key: str
    text: str
    default: Any = None
    choices: tuple[tuple[Any, str], ...] | Callable[[Answers], tuple[tuple[Any, str], ...]] = ()
    when: Callable[[Answers], bool] = lambda answers: True
    default_of: Callable[[Answers], Any] | None = None

    def options(self, answers: Answers) -> tuple[tuple[Any, str], ...]:
        return self.choices(answers) if callable(self.choices) else self.choices

    def settled(self, answers: Answers) -> bool:
        """Whether the machine leaves one answer only."""
        return len(self.options(answers)) == 1

    def ask(self, answers: Answers) -> Any:
        default = answers.get(self.key, self.default_of(answers) if self.default_of else self.default)
        choices = self.options(answers)
        if self.settled(answers):
            return choices[0][0]
        if choices:
            return menu.choose(self.text, choices, default)
        option = cluster_keys().get(self.key)
        return menu.line(self.text, default, (lambda text: option.convert(text, self.key)) if option else str)


YES_NO = ((False, "no"), (True, "yes"))


def _words(*values: str) -> tuple[tuple[str, str], ...]:
    return tuple((value, value) for value in values)


def _where(answers: Answers) -> tuple[tuple[str, str], ...]:
    present = system.accelerators()
    found = [("cpu", "the CPU")]
    if present.count:
        found.insert(0, (present.kind, f"its {present.count} {present.kind} device{'s' if present.count > 1 else ''}"))
    return tuple(found)


def _strategies(answers: Answers) -> tuple[tuple[str, str], ...]:
    found = [("NO", "a whole copy of the model on each process"), ("FSDP", "shard the model with FSDP")]
    if answers["_device"] != "cpu":
        found += [("DEEPSPEED", "shard the model with DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")]
    return tuple(found)


def _precisions(answers: Answers) -> tuple[tuple[str, str], ...]:
    words = (("no", "float32"), ("bf16", "bfloat16"), ("fp16", "float16 with gradient scaling"))
    return words if answers["_device"] == "cpu" else (*words, ("fp8", "8-bit floats"))


def _several(answers: Answers) -> bool:
    return (answers.get("num_processes") or 1) > 1


def _machines(answers: Answers) -> bool:
    return (answers.get("num_machines") or 1) > 1


# What each size splits, in the order asked. The processes that are left over read different samples.
SPLITS = {
    "tp": "Split each matrix over how many processes?",
    "cp": "Split the sequence over how many, keys and values exchanged?",
    "sp": "Split the sequence over how many, heads exchanged?",
    "pp": "Split the layers over how many?",
    "dp_replicate": "How many copies of the sharded model?",
}


def _size_key(name: str) -> str:
    return f"parallelism_config.parallelism_config_{name}_size"


def _left(answers: Answers, names: Sequence[str]) -> int:
    """The processes that these sizes leave to each of their parts."""
    return int(answers.get("num_processes") or 1) // math.prod(answers.get(_size_key(name), 1) for name in names)


def _sizes(name: str) -> Callable[[Answers], tuple[tuple[int, str], ...]]:
    """The sizes that the processes allow, beside those that were asked for before."""
    before = list(SPLITS)[: list(SPLITS).index(name)]
    refused = {"sp": ("cp",), "pp": ("cp", "sp")}.get(name, ())

    def choices(answers: Answers) -> tuple[tuple[int, str], ...]:
        left = _left(answers, before)
        if any(answers.get(_size_key(other), 1) > 1 for other in refused):
            left = 1
        # FSDP needs processes to shard over; those of one sequence count among them.
        sharded = answers.get("_strategy") == "FSDP" and name in ("tp", "pp", "dp_replicate")
        of_sequence = any(answers.get(_size_key(other), 1) > 1 for other in ("cp", "sp") if other in before)
        most = left // 2 if sharded and not of_sequence else left
        return ((1, "1: not at all"), *((size, str(size)) for size in range(2, most + 1) if left % size == 0))

    return choices


def _may_split(answers: Answers) -> bool:
    plain = answers.get("_strategy") == "NO" or _fsdp("2")(answers)
    return _several(answers) and plain


def _splits(answers: Answers) -> bool:
    return bool(answers.get("_split"))


def _copies(answers: Answers) -> bool:
    return _splits(answers) and answers.get("_strategy") == "FSDP"


def _of(kind: str) -> Callable[[Answers], bool]:
    return lambda answers: answers.get("_strategy") == kind


def _fsdp(version: str | None = None) -> Callable[[Answers], bool]:
    return lambda answers: (
        answers.get("_strategy") == "FSDP" and version in (None, answers.get("fsdp_config.fsdp_version"))
    )


def _default(name: str) -> Any:
    return options()[name].default


QUESTIONS: tuple[Question, ...] = (
    Question("_device", "What will this machine train on?", choices=_where),
    Question("num_machines", "How many machines take part?", 1),
    Question("machine_rank", "Which of them is this one, from 0?", 0, when=_machines),
    Question("main_process_ip", "Address of machine 0", when=_machines),
    Question("main_process_port", "Port of machine 0", 29500, when=_machines),
    Question(
        "num_processes",
        "How many processes in all, on all machines together?",
        default_of=lambda answers: (
            max(1, system.accelerators().count if answers["_device"] != "cpu" else 1) * (answers["num_machines"] or 1)
        ),
    ),
    Question("_strategy", "How is the model laid out?", "NO", _strategies, when=_several),
    Question("fsdp_config.fsdp_version", "Version of FSDP", "2", (("2", "2: fully_shard"), ("1", "1")), _fsdp()),
    Question(
        "fsdp_config.fsdp_sharding_strategy", "What is sharded?", "FULL_SHARD",
        _words("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"), _fsdp("1"),
    ),
    Question(
        "fsdp_config.fsdp_reshard_after_forward", "Free the gathered parameters after the forward pass?", True,
        YES_NO[::-1], _fsdp("2"),
    ),
    Question(
        "fsdp_config.fsdp_auto_wrap_policy", "Which layers are wrapped?", "TRANSFORMER_BASED_WRAP",
        _words("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), _fsdp(),
    ),
    Question(
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "Class names of the layers (empty: the model's)",
        when=lambda answers: answers.get("fsdp_config.fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP",
    ),
    Question(
        "fsdp_config.fsdp_min_num_params", "Smallest number of parameters wrapped", _default("fsdp_min_num_params"),
        when=lambda answers: answers.get("fsdp_config.fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP",
    ),
    Question(
        "fsdp_config.fsdp_state_dict_type", "How are weights saved?", "SHARDED_STATE_DICT",
        _words("SHARDED_STATE_DICT", "FULL_STATE_DICT"), _fsdp(),
    ),
    Question("fsdp_config.fsdp_offload_params", "Keep parameters in host memory?", False, YES_NO, _fsdp()),
    Question("fsdp_config.fsdp_cpu_ram_efficient_loading", "Load weights on rank 0 only?", True, YES_NO, _fsdp()),
    Question("fsdp_config.fsdp_activation_checkpointing", "Recompute activations?", False, YES_NO, _fsdp()),
    Question(
        "_split", "Split matrices, sequences or layers too, so that several processes share one copy of the model?",
        False, YES_NO, _may_split,
    ),
    *(
        Question(_size_key(name), words, 1, _sizes(name), _splits if name != "dp_replicate" else _copies)
        for name, words in SPLITS.items()
    ),
    Question("deepspeed_config.deepspeed_config_file", "DeepSpeed JSON file (empty: none)", when=_of("DEEPSPEED")),
    Question(
        "deepspeed_config.zero_stage", "ZeRO stage", 2,
        ((0, "0"), (1, "1: optimizer"), (2, "2: and gradients"), (3, "3: and parameters")),
        lambda answers: _of("DEEPSPEED")(answers) and not answers.get("deepspeed_config.deepspeed_config_file"),
    ),
    Question(
        "deepspeed_config.offload_optimizer_device", "Where do optimizer states live?", "none",
        _words("none", "cpu", "nvme"), _of("DEEPSPEED"),
    ),
    Question(
        "deepspeed_config.offload_param_device", "Where do parameters live?", "none", _words("none", "cpu", "nvme"),
        lambda answers: answers.get("deepspeed_config.zero_stage") == 3,
    ),
    Question("megatron_lm_config.megatron_lm_tp_degree", "Tensor parallel size", 1, when=_of("MEGATRON_LM")),
    Question("megatron_lm_config.megatron_lm_pp_degree", "Pipeline parallel size", 1, when=_of("MEGATRON_LM")),
    Question("mixed_precision", "Which numbers?", "no", _precisions),
    Question(
        "dynamo_config.dynamo_backend", "Compile the model with torch.compile?", "no",
        (("no", "no"), ("inductor", "yes: inductor"), *_words("eager", "aot_eager", "cudagraphs")),
    ),
    Question(
        "enable_cpu_affinity", "Bind processes to the cores near their device?", False, YES_NO,
        lambda answers: answers["_device"] != "cpu" and _several(answers),
    ),
)  # fmt: skip


def ask(path: Path, questions: Sequence[Question] = QUESTIONS) -> Path:
    """Ask, show a summary, and write the file. `<` or the left arrow goes back a question."""
    answers: Answers = {}
    asked: list[int] = []
    at = 0
    while True:
        if at < len(questions):
            question = questions[at]
            if not question.when(answers):
                answers.pop(question.key, None)
                at += 1
                continue
            answer = question.ask(answers)
            if answer is not menu.BACK:
                answers[question.key] = answer
                # What had one answer only was not asked; going back must not stop there.
                if not question.settled(answers):
                    asked.append(at)
                at += 1
                continue
        elif _confirmed(path, answers):
            return launch_file.write(path, to_file(answers))
        at = asked.pop() if asked else 0


def _confirmed(path: Path, answers: Answers) -> bool:
    print("\n" + summary(to_file(answers)))
    return menu.choose(f"\nWrite this to {path}?", ((True, "yes"), (False, "no, go back")), True) is True


def to_file(answers: Answers) -> dict[str, Any]:
    """The answers as a configuration file has them."""
    data = machine_defaults(answers["mixed_precision"])
    data["use_cpu"] = answers["_device"] == "cpu"
    strategy = answers.get("_strategy", "NO")
    several = (answers.get("num_processes") or 1) > 1
    plain = "MULTI_CPU" if data["use_cpu"] else run_kind(answers["_device"])
    data["distributed_type"] = strategy if strategy != "NO" else plain if several else "NO"
    for key, value in answers.items():
        section, dot, name = key.partition(".")
        if key.startswith("_") or value is None or (name == "dynamo_backend" and value == "no"):
            continue
        if dot:
            data.setdefault(section, {})[name] = value
        else:
            data[key] = value
    if sizes := data.pop("parallelism_config", {}):
        _share_out(data, sizes, _left(answers, list(SPLITS)), strategy == "FSDP")
    return data


def _share_out(data: dict[str, Any], sizes: dict[str, int], left: int, sharded: bool) -> None:
    """Sizes above 1 into the file; the processes they leave are shards of one copy, or copies."""
    kept = {name: size for name, size in sizes.items() if size > 1}
    if kept:
        rest = _size_key("dp_shard" if sharded else "dp_replicate").partition(".")[2]
        data["parallelism_config"] = kept | ({rest: left} if left > 1 else {})


def summary(data: dict[str, Any]) -> str:
    lines = []
    for key, value in data.items():
        if isinstance(value, dict):
            lines.append(f"  {key}:")
            lines += [f"    {name}: {inner}" for name, inner in value.items()]
        else:
            lines.append(f"  {key}: {value}")
    return "\n".join(lines)
