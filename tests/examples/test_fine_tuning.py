# SPDX-License-Identifier: Apache-2.0
"""The examples of adapters: two processes print the losses of one, and transformers reads what is merged."""

import pytest
import torch
from packages import package

peft = package("peft")
PRELOADED = (
    "transformers.models.llama.modeling_llama", "peft", "bitsandbytes", "accelerate.parallel.fsdp.strategy",
    "torch.nn.parallel.distributed",
)  # fmt: skip
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}  # fmt: skip


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_two_processes_print_the_losses_of_one(name, printed, tmp_path):
    if name == "qlora":
        pytest.importorskip("bitsandbytes")
    texts, outputs = {}, {}
    for run, nproc, env in (("one", 1, {}), ("two", 2, {}), ("sharded", 2, FSDP)):
        outputs[run] = tmp_path / run
        texts[run] = printed(f"fine_tuning/{name}", nproc, "--output", outputs[run], env=env)
    losses = [float(line.rpartition(" ")[2]) for line in texts["one"][:3]]
    assert losses[0] > losses[1] > losses[2]
    assert texts["one"][:3] == texts["two"][:3] == texts["sharded"][:3]
    folders = [line.split(":")[0] for line in texts["sharded"][3:]]
    assert folders == (
        ["adapter", "checkpoint", "merged"] if name == "lora" else ["adapter", "checkpoint"]
    )
    if name == "lora":
        from transformers import AutoModelForCausalLM

        tokens = torch.arange(12).view(1, 12)
        one, two = (
            AutoModelForCausalLM.from_pretrained(outputs[run] / "merged")(tokens).logits
            for run in ("one", "sharded")
        )
        assert (one - two).abs().max() < 1e-3
