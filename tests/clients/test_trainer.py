# SPDX-License-Identifier: Apache-2.0
"""`transformers.Trainer` and its options train as plain PyTorch does, on one and two ranks.

`make test-clients` runs these tests with transformers 5 and with transformers 4.57.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from packages import package
from rank_pool import on_ranks
from toys import (
    Iterable,
    Sequences,
    StopAfter,
    arguments,
    batches_read,
    distance,
    llama,
    on_cpu,
    plain_training,
    token_mean,
    trained,
    transformers_4,
    unsharded_state,
)  # fmt: skip

transformers = package("transformers")
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.trainer",
)
pytestmark = pytest.mark.usefixtures("float64")

GROUPED = (
    {"group_by_length": True}
    if transformers_4()
    else {"train_sampling_strategy": "group_by_length"}
)
# Each case trains on global batches of 8 rows, in two epochs. The names are those of `TrainingArguments`.
OPTIONS = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "grouped": GROUPED,
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    "even_batches": {"accelerator_config": {"even_batches": False}},
    "use_seedable_sampler": {"accelerator_config": {"use_seedable_sampler": False}},
    "non_blocking": {"accelerator_config": {"non_blocking": True}, "dataloader_pin_memory": False},
    "num_steps": {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
    "sync_each_batch": {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    },
}
LIGHT = ("defaults", "accumulation", "dispatch_batches")


@on_ranks(1, 2, env=on_cpu())
@pytest.mark.parametrize(
    "name",
    [name if name in LIGHT else pytest.param(name, marks=pytest.mark.thorough) for name in OPTIONS],
)
def test_option(nproc, name, tmp_path):
    data, options = Sequences(48), OPTIONS[name]
    accumulated = 2 if name in ("accumulation", "num_steps", "sync_each_batch") else 1
    size = 8 // accumulated
    per_device = size if name == "split_batches" else size // nproc
    trainer = trained(tmp_path, data, per_device_train_batch_size=per_device, **options)
    if name == "grouped":
        # The sampler has read every row, to know its length.
        data.order = data.order[-2 * 48 // nproc :]
    batches = batches_read(data, size, nproc)
    epochs = [
        [row for batch in half for row in batch]
        for half in (batches[: len(batches) // 2], batches[len(batches) // 2 :])
    ]
    assert all(sorted(epoch) == list(range(48)) for epoch in epochs) and epochs[0] != epochs[1]
    expected = plain_training(
        llama(), [[data.rows[row] for row in batch] for batch in batches], accumulated
    )
    assert distance(expected.state_dict(), unsharded_state(trainer)) < 1e-9


@on_ranks(1, thorough=[2], env=on_cpu())
@pytest.mark.parametrize("dispatch", [None, False])
def test_iterable_set(nproc, dispatch, tmp_path):
    data = Iterable(48)
    options = {
        "accelerator_config": {"dispatch_batches": dispatch},
        "max_steps": 6,
        "num_train_epochs": 1,
    }
    trainer = trained(tmp_path, data, per_device_train_batch_size=8 // nproc, **options)
    expected = plain_training(llama(), [data.rows[start : start + 8] for start in range(0, 48, 8)])
    assert distance(expected.state_dict(), unsharded_state(trainer)) < 1e-9


@on_ranks(2, thorough=[1], env=on_cpu())
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_resume_in_mid_epoch(nproc, accumulation, tmp_path):
    options = {
        "per_device_train_batch_size": 8 // nproc // accumulation, "gradient_accumulation_steps": accumulation,
        "save_strategy": "steps", "save_steps": 4,
    }  # fmt: skip
    straight = trained(tmp_path / "straight", Sequences(48), **options)
    trained(tmp_path / "cut", Sequences(48), callbacks=[StopAfter(4)], **options)
    data = Sequences(48)
    resumed = trained(tmp_path / "cut", data, resume=True, **options)
    assert resumed.state.global_step == 12 and len(data.order) < 2 * 48 // nproc
    assert distance(unsharded_state(straight), unsharded_state(resumed)) == 0.0


@pytest.mark.thorough
@on_ranks(2, env=on_cpu())
def test_without_the_average_over_devices_each_rank_has_its_own_mean(tmp_path):
    """Then a step takes the mean over ranks of the mean over a rank's tokens, as DDP does without Accelerate."""
    data = Sequences(48)
    trainer = trained(
        tmp_path,
        data,
        per_device_train_batch_size=4,
        average_tokens_across_devices=False,
        num_train_epochs=1,
    )
    batches = [[data.rows[row] for row in batch] for batch in batches_read(data, 8, 2)]
    expected = plain_training(llama(), batches, parts=2)
    assert distance(expected.state_dict(), unsharded_state(trainer)) < 1e-9


@pytest.mark.thorough
@on_ranks(1, 2, env=on_cpu())
def test_auto_find_batch_size(nproc, tmp_path):
    """The batch size shrinks on all ranks until the largest batch fits; the run then begins anew."""
    model = llama()
    forward = model.forward

    @functools.wraps(forward)
    def limited(*args, **kwargs):
        if len(kwargs["input_ids"]) > 3:
            raise RuntimeError("CUDA out of memory.")
        return forward(*args, **kwargs)

    model.forward = limited
    data = Sequences(48)
    trainer = trained(
        tmp_path,
        data,
        model=model,
        per_device_train_batch_size=4,
        auto_find_batch_size=True,
        num_train_epochs=1,
    )
    data.order = data.order[-48 // nproc :]
    batches = [[data.rows[row] for row in batch] for batch in batches_read(data, 3 * nproc, nproc)]
    expected = plain_training(llama(), batches)
    assert distance(expected.state_dict(), unsharded_state(trainer)) < 1e-9


@on_ranks(1, thorough=[2], env=on_cpu())
def test_predict_and_evaluate(nproc, tmp_path):
    """The predictions are those of each row, once and in order, whatever the last batch."""
    model, rows, whole = llama(), Sequences(13, seed=2), Sequences(16, seed=2)
    trainer = transformers.Trainer(
        model=model, args=arguments(tmp_path, per_device_eval_batch_size=2), eval_dataset=whole
    )
    batch = {name: torch.stack([row[name] for row in rows.rows]) for name in rows.rows[0]}
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
        # The mean over the tokens of a step, of all ranks.
        steps = [whole.rows[start : start + 2 * nproc] for start in range(0, 16, 2 * nproc)]
        losses = [float(token_mean(model, step, counts_first=transformers_4())) for step in steps]
    found = trainer.predict(rows)
    assert found.predictions.shape == (13, 16, 32)
    assert float((torch.from_numpy(found.predictions) - logits).abs().max()) < 1e-9
    assert (found.label_ids == batch["labels"].numpy()).all()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)


@on_ranks(2, thorough=[1], env=on_cpu())
def test_generation(nproc, tmp_path):
    """`Seq2SeqTrainer` gathers generated sequences of different lengths."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    rows = Sequences(13, seed=2)
    options = arguments(
        tmp_path, transformers.Seq2SeqTrainingArguments, per_device_eval_batch_size=2, predict_with_generate=True,
        generation_max_length=8,
    )  # fmt: skip
    found = transformers.Seq2SeqTrainer(model=model, args=options).predict(rows).predictions
    # transformers gathers these with `gather`, which keeps the rows that fill the last step.
    assert len(found) == (13 if nproc == 1 else 16)
    for row, predicted in zip(rows.rows, found[:13], strict=True):
        inputs = {name: row[name][None] for name in ("input_ids", "attention_mask")}
        expected = model.generate(**inputs, max_length=8)[0].tolist()
        assert [token for token in predicted.tolist() if token >= 0][: len(expected)] == expected


@on_ranks(1, thorough=[2], env=on_cpu())
def test_bf16(nproc, tmp_path):
    """Autocast computes in bfloat16; the weights stay float32 and follow the plain run closely."""
    torch.set_default_dtype(torch.float32)
    data = Sequences(48)
    trainer = trained(tmp_path, data, per_device_train_batch_size=8 // nproc, bf16=True)
    batches = [[data.rows[row] for row in batch] for batch in batches_read(data, 8, nproc)]
    full = plain_training(llama(), batches).state_dict()
    found, initial = unsharded_state(trainer), llama().state_dict()
    assert {value.dtype for value in found.values()} == {torch.float32}

    def size(first, second):
        return math.sqrt(
            sum(float((value - second[name]).square().sum()) for name, value in first.items())
        )

    assert 0 < size(found, full) < 0.1 * size(full, initial)


@pytest.mark.slow
@pytest.mark.thorough
@on_ranks(1, env=on_cpu())
def test_torch_compile(tmp_path):
    torch.set_default_dtype(torch.float32)
    data = Sequences(16)
    trainer = trained(tmp_path, data, per_device_train_batch_size=8, torch_compile=True)
    expected = plain_training(
        llama(), [[data.rows[row] for row in batch] for batch in batches_read(data, 8, 1)]
    )
    assert distance(expected.state_dict(), unsharded_state(trainer)) < 1e-5
    # Saved names are those of the model, not of the compiled wrapper.
    trainer.save_model(tmp_path / "saved")
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert distance(saved, unsharded_state(trainer)) == 0.0
