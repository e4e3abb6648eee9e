# SPDX-License-Identifier: Apache-2.0
"""lm-eval scores a local task on two ranks as on one, and with an offloaded model; optimum imports its parts."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from toys import llama, on_cpu, word_tokenizer, words

pytest.importorskip("lm_eval")
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "lm_eval",
    "lm_eval.models.huggingface",
    "datasets",
)
ROWS = 11


def save(folder):
    """A model with its tokenizer, and a task of three choices."""
    llama().eval().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    lines = [json.dumps({"text": words(row, 3), "answer": row % 3}) for row in range(ROWS)]
    (folder / "task.jsonl").write_text("\n".join(lines))


def scores(folder, **options):
    """The log likelihoods of the choices of each row, and the results. The other ranks return None."""
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    task = ConfigurableTask(
        config={
            "task": "toy", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
            "dataset_kwargs": {"data_files": {"test": str(folder / "task.jsonl")}, "cache_dir": str(folder / "cache")},
            "doc_to_text": "{{text}}", "doc_to_target": "answer", "doc_to_choice": ["w1", "w2", "w3"],
            "metric_list": [{"metric": "acc"}],
        }
    )  # fmt: skip
    model = HFLM(pretrained=str(folder), device="cpu", batch_size=4, dtype="float32", **options)
    # Without the thousands of tasks that it comes with.
    manager = TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=[task], bootstrap_iters=0, task_manager=manager
    )
    if found is None:
        return None
    samples = sorted(found["samples"]["toy"], key=lambda sample: sample["doc_id"])
    return [[choice[0] for choice in sample["filtered_resps"]] for sample in samples], found[
        "results"
    ]["toy"]


def test_ranks_score_as_one_process(ranks, tmp_path):
    save(tmp_path)
    found = ranks(1).run(scores, tmp_path, env=on_cpu())[0]
    assert len(found[0]) == ROWS
    logits = llama().eval()(torch.tensor([[3, 6, 9]])).logits[0, -1].log_softmax(0)
    assert found[0][0] == pytest.approx(logits[[4, 5, 6]].tolist(), abs=1e-4)
    both = ranks(2).run(scores, tmp_path, env=on_cpu())[0]
    assert (
        both[0] == [pytest.approx(row, abs=1e-4) for row in found[0]]
        and both[1]["acc,none"] == found[1]["acc,none"]
    )
    offloaded = {
        "parallelize": True,
        "max_cpu_memory": 60_000,
        "offload_folder": str(tmp_path / "offload"),
    }
    placed = ranks(1).run(scores, tmp_path, **offloaded, env=on_cpu())[0]
    assert placed[0] == [pytest.approx(row, abs=1e-4) for row in found[0]]


def test_optimum_imports_with_this_package():
    utils = pytest.importorskip("optimum.utils.import_utils")
    assert utils.is_accelerate_available()
    assert importlib.import_module("optimum.gptq").GPTQQuantizer
