# SPDX-License-Identifier: Apache-2.0
"""`accelerate.export`: folders that `from_pretrained` and peft read, from a model in any layout."""

from __future__ import annotations

import pytest
import torch
from adapters import CASES, ROWS, arguments, base, build
from packages import package
from rank_pool import on_ranks
from toys import distance, llama, on_cpu

import accelerate
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.commands.export import main

peft = package("peft")
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "peft",
)

BATCH = {"input_ids": torch.stack([row["input_ids"] for row in ROWS[:4]])}


def read(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@on_ranks(2, env=on_cpu())
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_what_is_read(nproc, layout, tmp_path):
    check_what_is_read(layout, nproc, tmp_path)


def check_what_is_read(layout, nproc, tmp_path):
    """Merged models have the values of peft's own merge. The model itself computes as before."""
    torch.set_default_dtype(torch.float64)
    accelerator = Accelerator(cpu=True, **arguments(layout, nproc)[0])
    for case in [case for case in CASES if "tp" not in layout or case not in ("dora", "experts")]:
        model = accelerator.prepare(build(case))
        before = model(**BATCH).logits
        accelerate.export(
            model, tmp_path / case / "merged", merge_adapters=True, max_shard_size="20KB"
        )
        accelerate.export(model, tmp_path / case / "adapter")
        assert torch.equal(before, model(**BATCH).logits), case
        if accelerator.is_main_process:
            found = read(tmp_path / case / "merged")
            merged = build(case).merge_and_unload().state_dict()
            assert distance(merged, found.state_dict()) < 1e-12, case
            loaded = peft.PeftModel.from_pretrained(
                base(case), tmp_path / case / "adapter", autocast_adapter_dtype=False
            )
            names = {"save_embedding_layers": False}
            adapter, reference = (
                peft.get_peft_model_state_dict(m, **names) for m in (loaded, build(case))
            )
            assert distance(reference, adapter) == 0, case
        accelerator.free_memory()
    model = accelerator.prepare(llama(tie_word_embeddings=True))
    accelerate.export(model, tmp_path / "plain")
    if accelerator.is_main_process:
        assert (
            distance(
                llama(tie_word_embeddings=True).state_dict(), read(tmp_path / "plain").state_dict()
            )
            == 0
        )


def test_what_was_written_is_said(tmp_path, capsys):
    model = Accelerator(cpu=True).prepare(llama())
    accelerate.export(model, tmp_path / "out")
    (line,) = capsys.readouterr().err.splitlines()
    assert "LlamaForCausalLM" in line and str(tmp_path / "out") in line and line.endswith(" s")


@pytest.mark.thorough
@on_ranks(4, env=on_cpu())
def test_what_is_read_after_fsdp2_with_tensor_parallelism(tmp_path):
    check_what_is_read("fsdp tp", 4, tmp_path)


@on_ranks(2, env=on_cpu())
@pytest.mark.parametrize("layout", ["fsdp1", "pipeline"])
def test_layouts_without_whole_tensors(layout, tmp_path):
    """Checkpoints of them are exported."""
    torch.set_default_dtype(torch.float64)
    if layout == "fsdp1":
        options = {
            "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True)
        }
    else:
        options = {"parallelism_config": ParallelismConfig(pp_size=2)}
    accelerator = Accelerator(cpu=True, **options)
    model = accelerator.prepare(build("lora"))
    with pytest.raises(
        ValueError, match=r"FSDP1, DeepSpeed and pipelines.*accelerate export CHECKPOINT"
    ):
        accelerate.export(model, tmp_path / "out")
    accelerator.save_state(tmp_path / "checkpoint")
    if accelerator.is_main_process:
        assert not (tmp_path / "out").exists()
        main([str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--merge_adapters"])
        assert (
            distance(
                build("lora").merge_and_unload().state_dict(), read(tmp_path / "out").state_dict()
            )
            < 1e-12
        )


def test_what_is_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(llama())
    with pytest.raises(ValueError, match="merge_adapters=True, but this LlamaForCausalLM"):
        accelerate.export(model, tmp_path / "out", merge_adapters=True)
    prompts = peft.get_peft_model(
        llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    prompts = accelerator.prepare(prompts)
    with pytest.raises(ValueError, match=r"not have adapters.* merged"):
        accelerate.export(prompts, tmp_path / "out", merge_adapters=True)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file: pass a folder"):
        accelerate.export(model, tmp_path / "file")
    adapted = build("rslora")
    adapted.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="trains more than its adapters"):
        accelerate.export(accelerator.prepare(adapted), tmp_path / "out")
    assert not (tmp_path / "out").exists()
