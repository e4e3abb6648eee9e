# SPDX-License-Identifier: Apache-2.0
"""`accelerate estimate-memory`: the figures are those of a model really built; errors name the way out."""

import json

import pytest
import torch
from packages import package

from accelerate.commands import estimate
from accelerate.core.errors import ConfigurationError

transformers = package("transformers")

CONFIGS = {
    # The output layer is tied to the embedding: its memory counts once.
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 50,
        "n_positions": 8,
    },
    # Buffers of rotary embeddings, a checkpoint in bfloat16.
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 60,
        "dtype": "bfloat16",
    },
    "bert": {
        "architectures": ["Unheard"],
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
}


def stored(tensors):
    """The bytes of tensors by the memory they really have; what is shared counts once."""
    return sum(
        {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors
        }.values()
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_figures_are_those_of_a_built_model(tmp_path, kind, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    model = estimate.build(str(tmp_path if kind != "llama" else file))
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])

    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.dtype = torch.float32
    maker = getattr(
        transformers, CONFIGS[kind]["architectures"][0], transformers.AutoModel.from_config
    )
    built = maker(config)
    assert type(built) is type(model)
    whole, half = (
        estimate.footprint(model, "float32"),
        estimate.footprint(model, "float16"),
    )
    assert whole.total == stored([*built.parameters(), *built.buffers()])
    blocks = [
        part
        for part in built.modules()
        if type(part).__name__ in ("GPT2Block", "LlamaDecoderLayer")
    ]
    if blocks:
        assert whole.largest == max(
            stored([*block.parameters(), *block.buffers()]) for block in blocks
        )

    optimizer = torch.optim.AdamW(built.parameters())
    for weight in built.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    moments = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    gradients = stored([weight.grad for weight in built.parameters()])
    assert whole.training == whole.total + gradients + stored(moments)

    built.to(torch.float16)
    assert half.total == stored([*built.parameters(), *built.buffers()])
    assert half.training == whole.training + stored(built.parameters())
    whole_numbers = stored(tensor for tensor in built.buffers() if not tensor.is_floating_point())
    assert (
        estimate.footprint(model, "int8").total == (half.total - whole_numbers) // 2 + whole_numbers
    )
    assert (
        estimate.footprint(model, "int4").total == (half.total - whole_numbers) // 4 + whole_numbers
    )
    assert estimate.footprint(model, "int4").training is None

    estimate.main([str(tmp_path), "--dtypes", "float32", "int8"])
    told = capsys.readouterr().out
    assert f"{sum(weight.numel() for weight in built.parameters()):,} parameters" in told
    assert "float16" not in told and "every weight were quantized" in told


@pytest.mark.parametrize("name", ["GatedRepoError", "OfflineModeIsEnabled"])
def test_what_the_hub_does_not_give_is_told(name, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(repository, token=None, timeout=None):
        assert repository == "some/model" and timeout is not None
        kind = getattr(errors, name)
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "model_info", refuse)
    with pytest.raises(SystemExit) as end:
        estimate.main(["some/model"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "some/model" in told and name in told and "hf auth login" in told


def test_a_configuration_in_the_cache_needs_no_network(monkeypatch, tmp_path):
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **CONFIGS["gpt2"]}))
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json")
    )
    assert type(estimate.build("some/model")).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("content", "arguments", "told"),
    [
        (None, [], "does not contain a config.json"),
        ("{", [], "it is not JSON"),
        ("[]", [], "does not have any keys"),
        ("{}", [], "--library_name"),
        ('{"model_type": "no such type"}', [], "no such type"),
        ('{"model_type": "bert", "hidden_size": "wide"}', [], "transformers cannot build"),
        ('{"architecture": "resnet18", "num_features": 512}', [], "pip install timm"),
        ('{"model_type": "bert"}', ["--library_name", "timm"], "pip install timm"),
    ],
)
def test_what_cannot_be_built_is_told(tmp_path, content, arguments, told, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "is_available", lambda name: name != "timm")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SystemExit) as end:
        estimate.main([str(tmp_path), *arguments])
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_without_transformers_or_the_hub(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.setattr(estimate, "is_available", lambda name: False)
    with pytest.raises(ConfigurationError, match="pip install transformers"):
        estimate.build(str(tmp_path))
    with pytest.raises(ConfigurationError, match="huggingface_hub, which is not installed"):
        estimate.build("some/model")
    with pytest.raises(ConfigurationError, match="some/model does not exist"):
        estimate.build("./some/model")
