# SPDX-License-Identifier: Apache-2.0
"""Adapters on a quantized base in each layout: the values of a plain loop on the same base, dequantized."""

from __future__ import annotations

import pytest
import torch
from adapters import arguments, base, build, optimizer_of, plain, train
from packages import package
from rank_pool import on_ranks
from toys import distance, on_cpu

import accelerate
from accelerate import Accelerator
from accelerate.core.errors import ConfigurationError, PrepareError
from accelerate.core.imports import is_torch_version

peft = package("peft")
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "peft",
    "bitsandbytes",
    "torchao.quantization",
)

# FSDP2 shards whole numbers since torch 2.12.
STORAGE = torch.float32 if is_torch_version("<", "2.12") else torch.uint8


def quantized(kind):
    """The base of the case "lora" with its linear layers, except the output layer, quantized by a library."""
    model = base("lora").requires_grad_(False)
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear and name != "lm_head"
    ]
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(), lambda layer, name: name in dict(layers))
        return model
    import bitsandbytes

    for name, layer in layers:
        shape = layer.in_features, layer.out_features, False
        if kind == "8 bits":
            small = bitsandbytes.nn.Linear8bitLt(*shape, has_fp16_weights=False)
        else:
            small = bitsandbytes.nn.Linear4bit(
                *shape, torch.float32, quant_type="nf4", quant_storage=STORAGE
            )
        small.load_state_dict(layer.state_dict())
        model.set_submodule(name, small.to("cpu"))
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "8 bits", kind == "4 bits"
    return model


def dequantized(kind):
    """The same base with plain linear layers."""
    from peft.utils.integrations import dequantize_bnb_weight

    small, model = quantized(kind), base("lora").requires_grad_(False)
    for name, layer in small.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            if kind == "torchao":
                weight = layer.weight.dequantize()
            else:
                weight = dequantize_bnb_weight(layer.weight, getattr(layer, "state", None))
            model.get_submodule(name).weight.data = weight.float()
    return model


def prepared(accelerator, model):
    return accelerator.prepare(model, optimizer_of(model))


def trained_values(accelerator, model):
    state = accelerator.get_state_dict(model)
    return {name: value.clone() for name, value in (state or {}).items() if "lora_" in name}


@on_ranks(1, 2, env=on_cpu(), timeout=300)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [("ddp", "4 bits"), ("ddp", "8 bits"), ("ddp", "torchao"), ("fsdp", "4 bits")],
)
def test_training_and_checkpoint(nproc, layout, kind, tmp_path):
    """The values of a plain loop; a checkpoint of the adapter, which peft reads and which resumes bit-equal."""
    if layout == "fsdp" and nproc == 1:
        pytest.skip("no layout of its own")
    # torchao multiplies by the scales after the product: roundings differ.
    limit = 1e-4 if kind == "torchao" else 1e-6
    options, _ = arguments(layout, nproc)
    if layout == "fsdp":
        # As the launcher sets it. Each rank has the scales of quantized layers, and so their weights.
        options["fsdp_plugin"].cpu_ram_efficient_loading = True
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer = prepared(accelerator, build("lora", quantized(kind)))
    train(accelerator, model, optimizer, nproc, 0, 2)
    accelerator.save_state(tmp_path)
    train(accelerator, model, optimizer, nproc, 2, 4)
    last = trained_values(accelerator, model)
    accelerator.free_memory()

    model, optimizer = prepared(accelerator, build("lora", quantized(kind)))
    accelerator.load_state(tmp_path)
    train(accelerator, model, optimizer, nproc, 2, 4)
    resumed = trained_values(accelerator, model)
    if accelerator.is_main_process:
        expected = plain("lora", model=build("lora", dequantized(kind))).state_dict()
        print(
            kind,
            layout,
            nproc,
            distance({name: expected[name] for name in last}, last),
            distance(last, resumed),
            flush=True,
        )
        assert distance({name: expected[name] for name in last}, last) < limit
        assert distance(last, resumed) == 0
        loaded = peft.PeftModel.from_pretrained(dequantized(kind), tmp_path / "adapter")
        names = {"save_embedding_layers": False}
        reference = plain("lora", 2, build("lora", dequantized(kind)))
        states = (peft.get_peft_model_state_dict(model, **names) for model in (reference, loaded))
        assert distance(*states) < limit


# --- what is refused


@on_ranks(2, env=on_cpu())
def test_layouts_that_do_not_split_quantized_weights():
    fsdp = Accelerator(cpu=True, **arguments("fsdp", 2)[0])
    for kind, name in (("8 bits", "Int8Params"), ("torchao", "Int8Tensor")):
        with pytest.raises(
            PrepareError, match=rf"q_proj\.base_layer\.weight is a {name}, .* FSDP2 cannot shard"
        ):
            fsdp.prepare(build("lora", quantized(kind)))
    with pytest.raises(
        PrepareError, match=r"q_proj\.base_layer, whose weight is quantized \(Params4bit\)"
    ):
        Accelerator(cpu=True, **arguments("tp", 2)[0]).prepare(build("lora", quantized("4 bits")))


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_kernels_without_a_backward(target):
    """They are refused only where something in front of them trains."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = base("lora").requires_grad_(False)
    quantize_(
        model,
        Int8DynamicActivationInt8WeightConfig(),
        lambda layer, name: "mlp" in name and "proj" in name,
    )
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[target]))
    model = Accelerator(cpu=True).prepare(model)
    tokens = torch.arange(8).view(1, 8)
    if target == "lm_head":
        model(tokens).logits.sum().backward()
        return
    with pytest.raises(
        PrepareError,
        match=r"layers\.0\.mlp\.gate_proj\.weight is a Int8Tensor .* not support the backward pass",
    ):
        model(tokens)


@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "torchao"])
def test_export_writes_no_quantized_weights(kind, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(build("lora", quantized(kind)))
    with pytest.raises(
        ConfigurationError,
        match=r"layers\.0\.self_attn\.q_proj\.base_layer is quantized.*unquantized base",
    ):
        accelerate.export(model, tmp_path / "merged", merge_adapters=True)
    with pytest.raises(
        ConfigurationError, match=r"layers\.0\.self_attn\.q_proj is quantized.*save_pretrained"
    ):
        accelerate.export(quantized(kind), tmp_path / "base")
    assert not list(tmp_path.iterdir())
    accelerate.export(model, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(dequantized(kind), tmp_path / "adapter")
    assert (
        distance(
            *(
                peft.get_peft_model_state_dict(m, save_embedding_layers=False)
                for m in (model, loaded)
            )
        )
        == 0
    )
