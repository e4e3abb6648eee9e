# SPDX-License-Identifier: Apache-2.0
"""`accelerate estimate-memory`: the figures are those of a model really built; errors name the way out."""

import json

import pytest
import torch

from accelerate.commands import estimate
from accelerate.core.errors import ConfigurationError

transformers = pytest.importorskip("transformers")

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
    "bert": {"architectures": ["Unheard"], "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}


def stored(tensors):
    """The bytes of tensors by the memory they really have; what is shared counts once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_figures_are_those_of_a_built_model(tmp_path, kind, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    model = estimate.build(str(tmp_path if kind != "llama" else file))
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])

    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.dtype = torch.float32
    maker = getattr(transformers, CONFIGS[kind]["architectures"][0], transformers.AutoModel.from_config)
    built = maker(config)
    assert type(built) is type(model)
    whole, half = (
        estimate.footprint(model, "float32"),
        estimate.footprint(model, "float16"),
    )
    assert whole.total == stored([*built.parameters(), *built.buffers()])
    blocks = [part for part in built.modules() if type(part).__name__ in ("GPT2Block", "LlamaDecoderLayer")]
    if blocks:
        assert whole.largest == max(stored([*block.parameters(), *block.buffers()]) for block in blocks)

    optimizer = torch.optim.AdamW(built.parameters())
    for weight in built.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert whole.training.gradients == stored([weight.grad for weight in built.parameters()])
    assert whole.training.moments == stored(moments)
    assert whole.training.weights == whole.total and whole.training.copies == 0

    built.to(torch.float16)
    assert half.total == stored([*built.parameters(), *built.buffers()])
    assert half.training.copies == stored(built.parameters())
    whole_numbers = stored(tensor for tensor in built.buffers() if not tensor.is_floating_point())
    assert estimate.footprint(model, "int8").total == (half.total - whole_numbers) // 2 + whole_numbers
    assert estimate.footprint(model, "int4").total == (half.total - whole_numbers) // 4 + whole_numbers
    assert estimate.footprint(model, "int4").training is None

    estimate.main([str(tmp_path), "--dtypes", "float32", "int8"])
    told = capsys.readouterr().out
    assert f"{sum(weight.numel() for weight in built.parameters()):,} parameters" in told
    assert "float16" not in told and "as if every weight were quantised" in told


MISSING = {
    "GatedRepoError": "it is gated: accept its terms",
    "RepositoryNotFoundError": "the Hub has no such model",
    "LocalEntryNotFoundError": "the Hub cannot be reached and the model is not in the local cache",
    "EntryNotFoundError": "it has no config.json on the Hub",
}


@pytest.mark.parametrize("name", MISSING)
def test_what_the_hub_does_not_give_is_told(name, monkeypatch, capsys):
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(repository, file, token=None, local_files_only=False):
        assert (repository, file) == ("some/model", "config.json")
        kind = getattr(errors, name)
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(SystemExit) as end:
        estimate.main(["some/model"])
    assert end.value.code == 2
    assert MISSING[name] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "arguments", "told"),
    [
        (None, [], "has no config.json"),
        ("{", [], "cannot be read as JSON"),
        ("[]", [], "has no keys"),
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
    with pytest.raises(ConfigurationError, match="no such file or folder"):
        estimate.build("./some/model")


def test_bfloat16_of_a_function_s_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "models_of_this_test.py").write_text("import torch\ndef make(): return torch.nn.Linear(4, 3)\n")
    monkeypatch.chdir(tmp_path)
    estimate.main(["models_of_this_test:make", "--dtypes", "bf16", "float16"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "float16" in line]
    assert [row[0] for row in rows] == ["bfloat16", "float16"] * 2 and rows[0][1:] == rows[1][1:]
    with pytest.raises(SystemExit):
        estimate.main(["models_of_this_test:none", "--dtypes", "bf16"])
    assert "has no function 'none'" in capsys.readouterr().err


def test_a_hub_that_does_not_answer_is_not_asked_again(monkeypatch, tmp_path, capsys):
    import socket

    import huggingface_hub

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(SystemExit):
            estimate.main(["some/model"])
    told = capsys.readouterr().err
    assert "the Hub cannot be reached" in told and "Retry" not in told
