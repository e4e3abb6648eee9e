# SPDX-License-Identifier: Apache-2.0
"""The examples of adapters: two processes print the losses of one, and transformers reads what is merged."""

import contextlib
import io
import sys

import pytest
import torch
from ranks import run_script

peft = pytest.importorskip("peft")
PRELOADED = (
    "transformers.models.llama.modeling_llama", "peft", "bitsandbytes", "accelerate.parallel.fsdp.strategy",
    "torch.nn.parallel.distributed",
)  # fmt: skip
CPU = {"ACCELERATE_USE_CPU": "true"}
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}  # fmt: skip


def printed(path, *arguments):
    sys.path.insert(0, str(path.parent))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run_script(path, *arguments)
    return output.getvalue()


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_two_processes_print_the_losses_of_one(name, ranks, script, logs_no_mistake, tmp_path):
    if name == "qlora":
        pytest.importorskip("bitsandbytes")
    texts, outputs = {}, {}
    for run, nproc, env in (("one", 1, CPU), ("two", 2, CPU), ("sharded", 2, {**CPU, **FSDP})):
        case = ranks(nproc)
        outputs[run] = tmp_path / run
        first, *others = case.run(printed, script(f"fine_tuning/{name}"), "--output", outputs[run], env=env)
        logs_no_mistake(case.outputs)
        assert not any(others)
        texts[run] = first.splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in texts["one"][:3]]
    assert losses[0] > losses[1] > losses[2]
    assert texts["one"][:3] == texts["two"][:3] == texts["sharded"][:3]
    folders = [line.split(":")[0] for line in texts["sharded"][3:]]
    assert folders == (["adapter", "checkpoint", "merged"] if name == "lora" else ["adapter", "checkpoint"])
    if name == "lora":
        from transformers import AutoModelForCausalLM

        tokens = torch.arange(12).view(1, 12)
        one, two = (
            AutoModelForCausalLM.from_pretrained(outputs[run] / "merged")(tokens).logits for run in ("one", "sharded")
        )
        assert (one - two).abs().max() < 1e-3
