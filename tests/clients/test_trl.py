# SPDX-License-Identifier: Apache-2.0
"""trl's trainers on toy data: two ranks train the weights that one process trains, under DDP, FSDP2 and ZeRO-3."""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import torch
from rank_pool import on_ranks
from safetensors.torch import load_file
from toys import LEARNING_RATE, distance, llama, on_cpu, unsharded_state, word_tokenizer, words

trl = pytest.importorskip("trl")
PRELOADED = (
    "transformers.models.llama.modeling_llama", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer", "trl.trainer.reward_trainer", "peft",
)  # fmt: skip
needs_deepspeed = pytest.mark.skipif(
    not importlib.util.find_spec("deepspeed"), reason="needs deepspeed"
)
NAMES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
LAYOUTS = {
    "ddp": {},
    "fsdp2": {
        "fsdp": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    },
    "zero3": {
        "deepspeed": {
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
            **dict.fromkeys(NAMES, "auto"),
        }
    },
}


def model():
    return llama(eos_token_id=2)


def rows(kind):
    """Text of equal length: where the loss of a rank is a mean over its own tokens, all ranks have as many."""
    numbers = range(32)
    if kind == "sft":
        return {"text": [words(number, 4 + number % 5) for number in numbers]}
    pairs = {
        "chosen": [words(number + 1, 4) for number in numbers],
        "rejected": [words(number + 5, 3) for number in numbers],
    }
    return (
        pairs if kind == "reward" else {"prompt": [words(number, 3) for number in numbers], **pairs}
    )


def train(kind, folder, nproc, lora=False, **layout):
    """One epoch of global batches of 8 rows; the trainer."""
    from datasets import Dataset

    options = {
        "output_dir": str(folder), "per_device_train_batch_size": 8 // nproc, "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "seed": 0, "bf16": False, "gradient_checkpointing": False, **layout,
    }  # fmt: skip
    data = Dataset.from_dict(rows(kind))
    more = {}
    if lora:
        import peft

        more["peft_config"] = peft.LoraConfig(target_modules=["q_proj"], r=4)
    given = {
        "train_dataset": data,
        "eval_dataset": data,
        "processing_class": word_tokenizer(),
        **more,
    }
    if kind == "sft":
        trainer = trl.SFTTrainer(
            model=model(), args=trl.SFTConfig(max_length=16, **options), **given
        )
    elif kind == "dpo":
        reference = None if lora else model()
        trainer = trl.DPOTrainer(
            model=model(),
            ref_model=reference,
            args=trl.DPOConfig(max_length=16, **options),
            **given,
        )
    else:
        from transformers import LlamaForSequenceClassification

        config = model().config
        config.num_labels = 1
        torch.manual_seed(0)
        scorer = LlamaForSequenceClassification(config)
        trainer = trl.RewardTrainer(
            model=scorer, args=trl.RewardConfig(max_length=16, **options), **given
        )
    trainer.train()
    return trainer


def results(kind, folder, nproc, dtype, **layout):
    torch.set_default_dtype(dtype)
    trainer = train(kind, folder, nproc, **layout)
    trainer.save_model()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, trainer.evaluate()["eval_loss"], unsharded_state(trainer)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "layout", "lora"),
    [
        ("sft", "ddp", False), ("sft", "ddp", True), ("dpo", "ddp", False), ("dpo", "ddp", True),
        ("reward", "ddp", False), ("sft", "fsdp2", False), ("sft", "fsdp2", True), ("dpo", "fsdp2", False),
        ("reward", "fsdp2", False),
        pytest.param("sft", "zero3", False, marks=needs_deepspeed),
        pytest.param("dpo", "zero3", False, marks=needs_deepspeed),
    ],
)  # fmt: skip
def test_ranks_train_as_one_process(kind, layout, lora, ranks, tmp_path):
    # DeepSpeed computes in float32.
    dtype, limit = (torch.float32, 5e-4) if layout == "zero3" else (torch.float64, 1e-6)
    alone = ranks(1).run(results, kind, tmp_path / "alone", 1, dtype, lora=lora, env=on_cpu())[0]
    both = ranks(2).run(
        results, kind, tmp_path / "both", 2, dtype, lora=lora, **LAYOUTS[layout], env=on_cpu()
    )[0]
    # The trainer rounds its losses to 4 digits.
    assert both[0] == pytest.approx(alone[0], abs=2e-4) and len(set(alone[0])) > 1
    assert both[1] == pytest.approx(alone[1], abs=1e-4)
    assert distance(alone[2], both[2]) < limit
    if lora:
        one, two = (
            load_file(tmp_path / run / "adapter_model.safetensors") for run in ("alone", "both")
        )
        assert distance(one, two) < limit


def policy_training(folder, nproc, **layout):
    """Group-relative policy training of a model that is rewarded for variety; the rewards and whether it has moved."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM

    home = folder / f"model{os.environ.get('RANK', 0)}"
    model().save_pretrained(home, is_main_process=True)
    word_tokenizer().save_pretrained(home)
    before = model().state_dict()

    def variety(completions, **kwargs):
        return [float(len(set(text.split()))) for text in completions]

    arguments = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=8 // nproc, num_train_epochs=1, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0, bf16=False,
        gradient_checkpointing=False, num_generations=4, max_completion_length=6, beta=0.1, **layout,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(home), reward_funcs=variety, args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [words(number, 3) for number in range(16)]}),
    )  # fmt: skip
    trainer.train()
    history = [row for row in trainer.state.log_history if "reward" in row]
    after = unsharded_state(trainer)
    return history, distance(before, after) if trainer.accelerator.is_main_process else None


@pytest.mark.timeout(300)
@on_ranks(1, 2, env=on_cpu())
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_policy_training(nproc, layout, tmp_path):
    """Sampled texts differ between numbers of ranks, so there is no run to equal; statistics and movement are."""
    if nproc == 1 and layout != "ddp":
        pytest.skip("needs two ranks")
    if layout == "zero3":
        # As the launcher does. transformers does it too, but not on CPUs; its models are then sharded for one rank.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    history, moved = policy_training(tmp_path, nproc, **LAYOUTS[layout])
    assert len(history) == 8
    for row in history:
        assert 1 <= row["reward"] <= 6 and math.isfinite(row["grad_norm"])
        assert row["completions/max_length"] <= 6
    assert moved is None or moved > 1e-3


def test_command_line(tmp_path):
    """trl's command adds its own arguments to the launcher's parser, and reads its files of launch options."""
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    arguments = resolve_accelerate_config_argument(["--accelerate_config", "zero2", "--lr", "1"])
    assert arguments[0] == "--config_file" and arguments[2:] == ["--lr", "1"]
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(arguments[1]).distributed_type == "DEEPSPEED"
