# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained` of models that are held in parts."""

import copy

import pytest
from ranks import run_ranks
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.parallel.pretrained import ask_for_state


class Saved(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def save_pretrained(self, folder, is_main_process=True, state_dict=None, **options):
        return id(self), folder, is_main_process, state_dict, options


class SavedByKeywords(nn.Linear):
    def save_pretrained(self, folder, **options):
        return options


def test_a_part_is_not_written():
    model = Saved()
    ask_for_state(model)
    for where in (model, copy.deepcopy(model)):
        with pytest.raises(PrepareError, match=r"part of Saved: give it state_dict=accelerator\.get_state_dict"):
            where.save_pretrained("folder", state_dict=None)
        # On a rank that writes nothing the gathered state is empty.
        assert where.save_pretrained("folder", False, {}, a=1) == (id(where), "folder", False, {}, {"a": 1})
    model = SavedByKeywords(2, 2)
    ask_for_state(model)
    with pytest.raises(PrepareError):
        model.save_pretrained("folder")
    assert model.save_pretrained("folder", state_dict={"a": 1}) == {"state_dict": {"a": 1}}


def test_models_without_it_and_models_with_a_mesh_of_their_own():
    for model in (nn.Linear(2, 2), Saved()):
        model._device_mesh = object()
        ask_for_state(model)
        assert "save_pretrained" not in vars(model)


def test_a_prepared_model(tmp_path):
    pytest.importorskip("transformers")
    script = """
        import sys
        import transformers
        from accelerate import Accelerator
        from accelerate.core.errors import PrepareError
        from accelerate.parallelism_config import ParallelismConfig

        sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
        model = accelerator.prepare(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
        try:
            model.save_pretrained(sys.argv[1])
        except PrepareError as error:
            state = accelerator.get_state_dict(model)
            main = accelerator.is_main_process
            accelerator.unwrap_model(model).save_pretrained(sys.argv[1], is_main_process=main, state_dict=state)
            accelerator.wait_for_everyone()
            found = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1]).state_dict()
            print(all(found[name].equal(value) for name, value in state.items()))
    """
    assert all("True" in result.stdout for result in run_ranks(script, 2, tmp_path))
