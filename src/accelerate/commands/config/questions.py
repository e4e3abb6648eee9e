# SPDX-License-Identifier: Apache-2.0
"""The questions of `accelerate config`: a table in order, each only where it matters, with a way back."""

from __future__ import annotations

import functools
import math
import select
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import launch_file
from ...config.launch_file import cluster_keys
from ...core import system
from ...core.errors import ConfigurationError
from ...core.objects import counted
from ...core.options import options
from .default import machine_defaults, run_kind

Answers = dict[str, Any]
# The answer that goes back to the question before.
BACK = object()


@dataclass(frozen=True)
class Question:
    """One question. key: where the answer goes in the file (dotted); one that begins with `_` is not written."""

    key: str
    text: str
    default: Any = None
    choices: tuple[tuple[Any, str], ...] | Callable[[Answers], tuple[tuple[Any, str], ...]] = ()
    when: Callable[[Answers], bool] = lambda answers: True
    default_of: Callable[[Answers], Any] | None = None

    def options(self, answers: Answers) -> tuple[tuple[Any, str], ...]:
        """Return the choices as (value, text) pairs, given the previous answers."""
        if callable(self.choices):
            return self.choices(answers)
        return self.choices

    def has_one_answer(self, answers: Answers) -> bool:
        """Whether the machine leaves one answer only."""
        return len(self.options(answers)) == 1

    def prompt(self, answers: Answers) -> Any:
        """Return the answer given on the terminal. A question with one possible answer is skipped."""
        default = answers.get(
            self.key, self.default_of(answers) if self.default_of else self.default
        )
        choices = self.options(answers)
        if self.has_one_answer(answers):
            return choices[0][0]
        if choices:
            return choose(self.text, choices, default, self.help)
        option = cluster_keys().get(self.key)
        check: Callable[[str], Any] = str
        if option:
            check = functools.partial(option.convert, where=self.key)
        return line(self.text, default, check, self.help)

    @property
    def help(self) -> str:
        """What the answer means, where it is stored, and the flag that replaces it."""
        option = cluster_keys().get(self.key)
        if option is None:
            return _HELP.get(self.key, "")
        return f"{option.help} Stored as {self.key}; `accelerate launch {option.flag}` replaces it for one launch."


# Of the questions that are no option.
_HELP = {
    "_task": "It selects the script and the packages that the script needs; the other files are "
    "the same.",
    "_device": "Which devices the processes use: one process for each accelerator, or processes on the CPU.",
    "_strategy": "Replicas are fastest if the model, its gradients and the optimizer states fit "
    "on one device; the other choices divide them among the processes.",
    "_split": "Tensor, context, sequence and pipeline parallelism, for models or sequences that "
    "are too large for one device even when sharded.",
}
_POLICY = "fsdp_config.fsdp_auto_wrap_policy"
_DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"
YES_NO = ((False, "no"), (True, "yes"))


def _where(answers: Answers) -> tuple[tuple[str, str], ...]:
    present = system.accelerators()
    choices = [("cpu", "the CPU")]
    if present.number:
        devices = counted(present.number, f"{present.kind} device")
        choices.insert(0, (present.kind, f"its {devices}"))
    return tuple(choices)


def _strategies(answers: Answers) -> tuple[tuple[str, str], ...]:
    choices = [
        ("NO", "a replica of the model on each process"),
        ("FSDP", "shard the model with FSDP"),
    ]
    if answers["_device"] != "cpu":
        choices += [("DEEPSPEED", "shard the model with DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")]
    return tuple(choices)


def _precisions(answers: Answers) -> tuple[tuple[str, str], ...]:
    words = (("no", "float32"), ("bf16", "bfloat16"), ("fp16", "float16 with gradient scaling"))
    if answers["_device"] == "cpu":
        return words
    return (*words, ("fp8", "8-bit floats"))


def _several(answers: Answers) -> bool:
    return (answers.get("num_processes") or 1) > 1


def _machines(answers: Answers) -> bool:
    return (answers.get("num_machines") or 1) > 1


# The dimensions that a model can be split over, in the order of the questions. The processes that are left over read
# different samples.
SPLITS = ("tp", "cp", "sp", "pp", "dp_replicate")


def _size_key(name: str) -> str:
    return f"parallelism_config.parallelism_config_{name}_size"


def _left(answers: Answers, names: Sequence[str]) -> int:
    """The number of processes that these sizes leave over."""
    sizes = [int(answers.get(_size_key(name), 1)) for name in names]
    return int(answers.get("num_processes") or 1) // math.prod(sizes)


def _sizes(name: str) -> Callable[[Answers], tuple[tuple[int, str], ...]]:
    """The sizes that the number of processes allows with the sizes chosen before."""
    before = SPLITS[: SPLITS.index(name)]
    refused = {"sp": ("cp",), "pp": ("cp", "sp")}.get(name, ())

    def choices(answers: Answers) -> tuple[tuple[int, str], ...]:
        left = _left(answers, before)
        if any(answers.get(_size_key(other), 1) > 1 for other in refused):
            left = 1
        # FSDP needs processes to shard over; those of one sequence count among them.
        sharded = answers.get("_strategy") == "FSDP" and name in ("tp", "pp", "dp_replicate")
        of_sequence = any(
            answers.get(_size_key(other), 1) > 1 for other in ("cp", "sp") if other in before
        )
        most = left // 2 if sharded and not of_sequence else left
        return (
            (1, "1: do not split"),
            *((size, str(size)) for size in range(2, most + 1) if left % size == 0),
        )

    return choices


def _may_split(answers: Answers) -> bool:
    plain = answers.get("_strategy") == "NO" or _fsdp("2")(answers)
    return _several(answers) and plain


def _splits(answers: Answers) -> bool:
    return bool(answers.get("_split"))


def _replicates(answers: Answers) -> bool:
    return _splits(answers) and answers.get("_strategy") == "FSDP"


def _all_devices(answers: Answers) -> int:
    """One process for each device on as many machines as take part."""
    if answers["_device"] != "cpu":
        devices = system.accelerators().number
    else:
        devices = 1
    return max(1, devices) * (answers["num_machines"] or 1)


def _answered(key: str, answer: str) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(key) == answer


def _fsdp(version: str | None = None) -> Callable[[Answers], bool]:
    return lambda answers: (
        answers.get("_strategy") == "FSDP"
        and version in (None, answers.get("fsdp_config.fsdp_version"))
    )


def _row(
    name: str,
    default: Any = None,
    choices: Sequence[Any] | Callable[[Answers], tuple[tuple[Any, str], ...]] = (),
    when: Callable[[Answers], bool] = lambda answers: True,
    default_of: Callable[[Answers], Any] | None = None,
) -> Question:
    """The question for an option, in the words of its row; default and choices are the row's where none are given."""
    row = options()[name]
    if not callable(choices):
        choices = tuple(
            choice if isinstance(choice, tuple) else (choice, str(choice))
            for choice in choices or row.choices
        )
    return Question(
        row.file_key,
        row.question,
        row.default if default is None else default,
        choices,
        when,
        default_of,
    )


QUESTIONS: tuple[Question, ...] = (
    Question("_device", "What will this machine train on?", choices=_where),
    _row("num_machines", 1),
    _row("machine_rank", 0, when=_machines),
    _row("main_process_ip", when=_machines),
    _row("main_process_port", 29500, when=_machines),
    _row("num_processes", default_of=_all_devices),
    Question("_strategy", "How is the model distributed?", "NO", _strategies, _several),
    _row("fsdp_version", "2", (("2", "FSDP2, fully_shard"), ("1", "FSDP1")), _fsdp()),
    _row("fsdp_sharding_strategy", when=_fsdp("1")),
    _row("fsdp_reshard_after_forward", True, YES_NO[::-1], _fsdp("2")),
    _row("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", when=_fsdp()),
    _row("fsdp_transformer_layer_cls_to_wrap", when=_answered(_POLICY, "TRANSFORMER_BASED_WRAP")),
    _row("fsdp_min_num_params", when=_answered(_POLICY, "SIZE_BASED_WRAP")),
    _row("fsdp_state_dict_type", "SHARDED_STATE_DICT", ("SHARDED_STATE_DICT", "FULL_STATE_DICT"), _fsdp()),
    _row("fsdp_offload_params", False, YES_NO, _fsdp()),
    _row("fsdp_cpu_ram_efficient_loading", True, YES_NO, _fsdp()),
    _row("fsdp_activation_checkpointing", False, YES_NO, _fsdp()),
    Question(
        "_split", "Also split matrices, sequences or layers, so that several processes share one "
                  "replica of the model?",
        False, YES_NO, _may_split,
    ),
    *(
        _row(f"parallelism_config_{name}_size", 1, _sizes(name), _splits if name != "dp_replicate" else _replicates)
        for name in SPLITS
    ),
    _row("deepspeed_config_file", when=_answered("_strategy", "DEEPSPEED")),
    _row(
        "zero_stage", 2, (0, (1, "1: optimizer"), (2, "2: and gradients"), (3, "3: and parameters")),
        lambda answers: answers.get("_strategy") == "DEEPSPEED" and not answers.get(_DEEPSPEED_FILE),
    ),
    _row("offload_optimizer_device", "none", when=_answered("_strategy", "DEEPSPEED")),
    _row(
        "offload_param_device", "none", when=lambda answers: answers.get("deepspeed_config.zero_stage") == 3,
    ),
    _row("megatron_lm_tp_degree", when=_answered("_strategy", "MEGATRON_LM")),
    _row("megatron_lm_pp_degree", when=_answered("_strategy", "MEGATRON_LM")),
    _row("mixed_precision", "no", _precisions),
    _row("dynamo_backend", "no", ("no", ("inductor", "yes: inductor"), "eager", "aot_eager", "cudagraphs")),
    _row(
        "enable_cpu_affinity", None, YES_NO, lambda answers: answers["_device"] != "cpu" and _several(answers),
    ),
)  # fmt: skip


def run(path: Path, questions: Sequence[Question] = QUESTIONS) -> Path:
    """Put the questions, show the file, and write it."""
    return launch_file.write(path, ask(f"Write this to {path}?", questions, path))


def ask(
    confirmation: str, questions: Sequence[Question] = QUESTIONS, path: Path = Path("answers.yaml")
) -> dict[str, Any]:
    """Put the questions, show the file that they make, and return its content."""
    return to_file(answered(confirmation, questions, path))


def answered(confirmation: str, questions: Sequence[Question], path: Path) -> Answers:
    """Put the questions, show the file that they make, and return the answers. `<` goes back a question."""
    print(
        "Enter takes the answer in brackets, ? explains the question, < goes back to the "
        "previous one.\n"
    )
    answers: Answers = {}
    visited: list[int] = []
    position = 0
    while True:
        if position < len(questions):
            question = questions[position]
            if not question.when(answers):
                answers.pop(question.key, None)
                position += 1
                continue
            answer = question.prompt(answers)
            if answer is not BACK:
                answers[question.key] = answer
                # A question with one possible answer is skipped; going back must not stop there.
                if not question.has_one_answer(answers):
                    visited.append(position)
                position += 1
                continue
        else:
            print("\n" + textwrap.indent(launch_file.text_of(path, to_file(answers)), "  "), end="")
            yes_or_back = ((True, "yes"), (False, "no, go back"))
            if choose(f"\n{confirmation}", yes_or_back, True) is True:
                return answers
        position = visited.pop() if visited else 0


def to_file(answers: Answers) -> dict[str, Any]:
    """The answers as a configuration file has them."""
    data = machine_defaults(answers["mixed_precision"])
    data["use_cpu"] = answers["_device"] == "cpu"
    strategy = answers.get("_strategy", "NO")
    several = (answers.get("num_processes") or 1) > 1
    if data["use_cpu"]:
        plain = "MULTI_CPU"
    else:
        plain = run_kind(answers["_device"])
    if strategy != "NO":
        data["distributed_type"] = strategy
    elif several:
        data["distributed_type"] = plain
    else:
        data["distributed_type"] = "NO"
    for key, value in answers.items():
        section, dot, name = key.partition(".")
        if key.startswith("_") or value is None or (name == "dynamo_backend" and value == "no"):
            continue
        if dot:
            data.setdefault(section, {})[name] = value
        else:
            data[key] = value
    sizes = {name: size for name, size in data.pop("parallelism_config", {}).items() if size > 1}
    if sizes:
        # The processes that the sizes leave are shards of one copy, or copies.
        left = _left(answers, SPLITS)
        remaining = _size_key("dp_shard" if strategy == "FSDP" else "dp_replicate").partition(".")[
            2
        ]
        data["parallelism_config"] = sizes | ({remaining: left} if left > 1 else {})
    return data


# -- prompts of a terminal


def choose(title: str, options: Sequence[tuple[Any, str]], default: Any, help: str = "") -> Any:
    """The value of the option chosen, or BACK. `options` are values with their words; `?` shows `help`."""
    values = [value for value, _ in options]
    print(title)
    for number, (_, text) in enumerate(options):
        print(f"  {number}: {text}")

    def check(text: str) -> int:
        if not text.isdigit() or int(text) >= len(options):
            raise ValueError(
                f"enter a number from 0 to {len(options) - 1}, ? for help, or < to go back"
            )
        return int(text)

    number = line("number", values.index(default) if default in values else 0, check, help)
    if number is BACK:
        return BACK
    return values[number]


def line(title: str, default: Any, check: Callable[[str], Any], help: str = "") -> Any:
    """The value that `check` makes of a typed line, repeated until it accepts one; or BACK. Empty is the default.

    `<` and `back` go back, and `?` shows `help`.
    """
    shown = f" [{default}]" if default not in (None, "") else ""
    while True:
        try:
            print(f"{title}{shown}: ", end="", flush=True)
            # `input` waits on when a Ctrl-C comes between its look at signals and its read of a terminal.
            while sys.stdin.isatty() and not select.select([sys.stdin], [], [], 0.25)[0]:
                pass
            text = input().strip()
        except EOFError:
            if sys.stdin.isatty():  # Ctrl-D, the same wish as Ctrl-C
                raise KeyboardInterrupt from None
            print()
            raise ConfigurationError(
                "the input ended before all questions were answered; `accelerate config default` "
                "and `accelerate init --task NAME` do not ask questions"
            ) from None
        if text in ("<", "back"):
            return BACK
        if text == "?":
            keys = (
                "Enter takes the default, < or back returns to the previous question, Ctrl-C "
                "ends without writing."
            )
            print(textwrap.indent(textwrap.fill(f"{help} {keys}".strip(), 90), "  "))
            continue
        if not text:
            return default
        try:
            return check(text)
        except (ConfigurationError, ValueError) as error:
            print(f"  {error}")
