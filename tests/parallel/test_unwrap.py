# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained` of models of which each process has a shard."""

import copy

import pytest
from layouts import units_of
from rank_pool import on_ranks
from safetensors.torch import load_file
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from accelerate.parallel.unwrap import require_state_dict
from accelerate.parallelism_config import ParallelismConfig

PRELOADED = ("transformers.models.llama.modeling_llama",)
SIZES = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16,
}  # fmt: skip


class Saved(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def save_pretrained(self, folder, is_main_process=True, state_dict=None, **options):
        return id(self), folder, is_main_process, state_dict, options


class SavedByKeywords(nn.Linear):
    def save_pretrained(self, folder, **options):
        return options


def test_a_shard_is_not_written():
    model = Saved()
    require_state_dict(model)
    for where in (model, copy.deepcopy(model)):
        with pytest.raises(
            PrepareError, match=r"shard of Saved\. Pass state_dict=accelerator\.get_state_dict"
        ):
            where.save_pretrained("folder", state_dict=None)
        # On a rank that writes nothing the gathered state is empty.
        assert where.save_pretrained("folder", False, {}, a=1) == (
            id(where),
            "folder",
            False,
            {},
            {"a": 1},
        )
    model = SavedByKeywords(2, 2)
    require_state_dict(model)
    with pytest.raises(PrepareError):
        model.save_pretrained("folder")
    assert model.save_pretrained("folder", state_dict={"a": 1}) == {"state_dict": {"a": 1}}


def test_models_without_it_and_models_with_a_mesh_of_their_own():
    for model in (nn.Linear(2, 2), Saved()):
        model._device_mesh = object()
        require_state_dict(model)
        assert "save_pretrained" not in vars(model)


class SavesByModuleNames(nn.Module):
    """As peft does: what belongs to the adapter is found by the names of modules."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.adapter = nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x) + self.adapter(x)

    def save_pretrained(self, folder, **options):
        prefixes = tuple(f"{name}." for name, _ in self.named_modules() if name.endswith("adapter"))
        return [name for name in options["state_dict"] if name.startswith(prefixes)]


@on_ranks(2)
@pytest.mark.parametrize("version", [1, 2])
def test_modules_are_found_by_their_plain_names(version):
    plugin = units_of(
        "Linear",
        version=version,
        use_orig_params=True if version == 1 else None,
        activation_checkpointing=True,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(SavesByModuleNames())
    state = accelerator.get_state_dict(model)
    inner = accelerator.unwrap_model(model)
    assert {name for name, _ in inner.named_modules()} == {"", "body", "adapter"}
    saved = inner.save_pretrained("folder", state_dict=state)
    assert saved == (["adapter.weight", "adapter.bias"] if accelerator.is_main_process else [])
    # The wrapper around the model needs the names as they are.
    if version == 1:
        assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())


@on_ranks(2)
@pytest.mark.parametrize("version", [1, 2])
def test_an_adapter_of_peft(version, tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    plugin = units_of(
        "LlamaDecoderLayer", version=version, use_orig_params=True if version == 1 else None
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model = accelerator.prepare(
        peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    )
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path, is_main_process=accelerator.is_main_process, state_dict=state
    )
    if accelerator.is_main_process:
        saved = load_file(tmp_path / "adapter_model.safetensors")
        expected = {
            name.replace(".default", ""): value for name, value in state.items() if "lora_" in name
        }
        assert saved.keys() == expected.keys() and len(saved) == 4
        assert all(value.equal(expected[name]) for name, value in saved.items())


@on_ranks(2)
def test_a_prepared_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    model = accelerator.prepare(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))
    with pytest.raises(PrepareError):
        model.save_pretrained(tmp_path)
    state = accelerator.get_state_dict(model)
    main = accelerator.is_main_process
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path, is_main_process=main, state_dict=state
    )
    accelerator.wait_for_everyone()
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(found[name].equal(value) for name, value in state.items())
