# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers and setfit train on two ranks as on one.

Both refuse to train with this distribution, because they look for "huggingface" in the home page of the installed one.
This package does not claim that. The tests replace the check, to run all that follows it.
"""

from __future__ import annotations

import os

import pytest
from rank_pool import on_ranks
from toys import distance, on_cpu, replace_owner_check, sentence_encoder

pytest.importorskip("sentence_transformers")
PRELOADED = (
    "transformers.models.bert.modeling_bert",
    "sentence_transformers",
    "setfit",
    "datasets",
)


def training(folder, nproc, kind):
    """Two epochs of global batches of 8 pairs with an in-batch loss over all ranks; losses and weights."""
    import sentence_transformers  # noqa: F401

    replace_owner_check()
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    model = sentence_encoder(folder / f"encoder{os.environ.get('RANK', 0)}-{nproc}")
    data = Dataset.from_dict(
        {
            "anchor": [f"w{row} w{(3 * row + 1) % 40}" for row in range(32)],
            "positive": [f"w{(row + 7) % 40} w{(3 * row + 1) % 40}" for row in range(32)],
        }
    )
    if kind == "gathered":
        loss = losses.MultipleNegativesRankingLoss(model, gather_across_devices=True)
    else:
        # No negatives of other pairs: the mean over ranks is the mean over all pairs.
        loss = losses.CosineSimilarityLoss(model)
        data = data.add_column("score", [float(row % 2) for row in range(32)])
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "out"), per_device_train_batch_size=8 // nproc, num_train_epochs=2, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=1, save_strategy="no", learning_rate=1e-2, seed=0,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, loss=loss
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return found, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["pairs", "gathered"])
def test_ranks_train_as_one_process(kind, ranks, tmp_path):
    alone = ranks(1).run(training, tmp_path, 1, kind, env=on_cpu())[0]
    both = ranks(2).run(training, tmp_path, 2, kind, env=on_cpu())[0]
    assert both[0] == pytest.approx(alone[0], abs=2e-4) and len(set(alone[0])) > 1
    assert distance(alone[1], both[1]) < 2e-5


@on_ranks(1, env=on_cpu())
def test_few_shot_training(tmp_path):
    """setfit: contrastive training of the encoder, then of the head."""
    pytest.importorskip("setfit")
    replace_owner_check()
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    data = Dataset.from_dict(
        {
            "text": [f"w{row % 2 * 20 + row} w{row % 2 * 20}" for row in range(16)],
            "label": [row % 2 for row in range(16)],
        }
    )
    model = SetFitModel(
        model_body=sentence_encoder(tmp_path / "encoder"), model_head=LogisticRegression()
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        batch_size=4,
        num_epochs=1,
        report_to="none",
        num_iterations=2,
    )

    def accuracy(predicted, expected):
        return {
            "accuracy": sum(int(a) == int(b) for a, b in zip(predicted, expected, strict=True))
            / len(expected)
        }

    trainer = Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, metric=accuracy
    )
    trainer.train()
    assert trainer.evaluate()["accuracy"] == 1.0


def test_the_check_of_the_home_page():
    """Fails when sentence-transformers drops the check: then `replace_owner_check` is not needed."""
    from sentence_transformers.util import environment

    assert not environment.is_accelerate_available()
