# SPDX-License-Identifier: Apache-2.0
"""diffusers: a UNet and a DiT train with its utilities and EMA, pipelines run offloaded, its example scripts run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import engines
import machines
import numpy
import pytest
import torch
from PIL import Image
from rank_pool import on_ranks
from ranks import output_of
from toys import distance, on_cpu

from accelerate import Accelerator, disk_offload

diffusers = pytest.importorskip("diffusers")
PRELOADED = (
    "diffusers.models.unets.unet_2d", "diffusers.models.transformers.dit_transformer_2d", "diffusers.training_utils",
    "diffusers.optimization", "diffusers.schedulers.scheduling_ddpm",
)  # fmt: skip
STEPS = 8
RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "diffusion.py"


def unet():
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=4,
    )  # fmt: skip


def dit():
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    # As built, the last layers are zero and nothing before them would learn.
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.copy_(
            torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1
        )
    return model


def predict(model, noisy, steps):
    if type(getattr(model, "module", model)).__name__ == "UNet2DModel":
        return model(noisy, steps).sample
    # The model drops class labels at random while it trains; this label is the one it drops to.
    return model(noisy, timestep=steps, class_labels=torch.full_like(steps, 10)).sample


def samples():
    """Images, their noise, and the steps of the noise."""
    generator = torch.Generator().manual_seed(2)
    images, noise = (torch.randn(2 * STEPS * 4, 3, 8, 8, generator=generator) for _ in range(2))
    return torch.utils.data.TensorDataset(
        images, noise, torch.randint(0, 100, (len(images),), generator=generator)
    )


def parts(model):
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    ema = EMAModel(
        model.parameters(),
        decay=0.9,
        use_ema_warmup=True,
        model_cls=type(model),
        model_config=model.config,
    )
    return optimizer, schedule, ema


def plain(model):
    """The same training in plain PyTorch: windows of two batches of 4."""
    optimizer, schedule, ema = parts(model)
    noising = diffusers.DDPMScheduler(100)
    for images, noise, steps in torch.utils.data.DataLoader(samples(), batch_size=8):
        found = predict(model, noising.add_noise(images, noise, steps), steps)
        torch.nn.functional.mse_loss(found, noise).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
    return model, ema


@on_ranks(1, 2, env=on_cpu())
@pytest.mark.parametrize("make", [unet, dit])
def test_training(nproc, make, tmp_path):
    """The loop of diffusers' examples, with their hooks of `save_state` and `load_state`."""
    torch.set_default_dtype(torch.float64)
    from diffusers.training_utils import EMAModel

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    model = make()
    kind = type(model)
    optimizer, schedule, ema = parts(model)

    def save(models, weights, folder):
        if accelerator.is_main_process:
            ema.save_pretrained(f"{folder}/ema")
            for one in models:
                one.save_pretrained(f"{folder}/model")
                weights.pop()

    def load(models, folder):
        ema.load_state_dict(EMAModel.from_pretrained(f"{folder}/ema", kind).state_dict())
        while models:
            loaded = kind.from_pretrained(folder, subfolder="model")
            models.pop().load_state_dict(loaded.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    loader = torch.utils.data.DataLoader(samples(), batch_size=4 // nproc)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    noising = diffusers.DDPMScheduler(100)
    for images, noise, steps in loader:
        with accelerator.accumulate(model):
            found = predict(model, noising.add_noise(images, noise, steps), steps)
            accelerator.backward(torch.nn.functional.mse_loss(found, noise))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.step(model.parameters())
    expected, expected_ema = plain(make())
    found = {
        name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()
    }
    assert distance(expected.state_dict(), found) < 1e-9
    shadows = dict(enumerate(ema.shadow_params))
    assert distance(dict(enumerate(expected_ema.shadow_params)), shadows) < 1e-9

    accelerator.save_state(tmp_path / "state")
    with torch.no_grad():
        for parameter in [*model.parameters(), *ema.shadow_params]:
            parameter.add_(1)
    accelerator.load_state(tmp_path / "state")
    assert distance(found, accelerator.unwrap_model(model).state_dict()) == 0.0
    assert (
        distance(dict(enumerate(expected_ema.shadow_params)), dict(enumerate(ema.shadow_params)))
        < 1e-9
    )


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """The folder of a Stable Diffusion pipeline of toy models, and the image that it makes."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("pipeline")
    words = [
        "<|startoftext|>",
        "<|endoftext|>",
        *"abcdefgh",
        *(f"{letter}</w>" for letter in "abcdefgh"),
    ]
    (folder / "vocab.json").write_text(
        json.dumps({word: number for number, word in enumerate(words)})
    )
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16
    )
    torch.manual_seed(0)
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip
    denoiser = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=2, cross_attention_dim=16,
    )  # fmt: skip
    coder = diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4,
    )  # fmt: skip
    made = diffusers.StableDiffusionPipeline(
        vae=coder, text_encoder=text, tokenizer=tokenizer, unet=denoiser, scheduler=diffusers.DDIMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    made.save_pretrained(folder / "saved")
    yield folder / "saved", image(made)
    shutil.rmtree(folder)


def image(made):
    made.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    return torch.tensor(
        made(
            "a b c",
            num_inference_steps=2,
            generator=generator,
            output_type="np",
            height=16,
            width=16,
        ).images
    )


def loaded(folder, **options):
    return diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None, **options)


@pytest.mark.parametrize(
    ("method", "hook", "device"),
    [
        ("enable_model_cpu_offload", "CpuOffload", "cpu"),
        ("enable_sequential_cpu_offload", "AlignDevicesHook", "meta"),
    ],
)
def test_offloaded_pipeline(method, hook, device, pipeline):
    """Twice, then with the hooks removed: always the image of the plain pipeline."""
    folder, expected = pipeline
    made = loaded(folder)
    getattr(made, method)(device="cpu")
    assert type(made.unet._hf_hook).__name__ == hook and made._execution_device == torch.device(
        "cpu:0"
    )
    assert made.unet.conv_in.weight.device.type == device
    assert torch.equal(image(made), expected) and torch.equal(image(made), expected)
    made.maybe_free_model_hooks()
    made.remove_all_hooks()
    assert torch.equal(image(made), expected)


def test_pipeline_with_other_placements(pipeline, tmp_path):
    folder, expected = pipeline
    balanced = loaded(folder, device_map="balanced")
    assert torch.equal(image(balanced), expected)

    grouped = loaded(folder)
    cpu = torch.device("cpu")
    diffusers.hooks.apply_group_offloading(
        grouped.unet, onload_device=cpu, offload_device=cpu, offload_type="leaf_level"
    )
    assert torch.equal(image(grouped), expected)

    on_disk = diffusers.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    disk_offload(on_disk, str(tmp_path), execution_device="cpu")
    assert on_disk.conv_in.weight.is_meta
    assert torch.equal(image(loaded(folder, unet=on_disk)), expected)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of 8 images with captions, each of which is its own condition."""
    folder = tmp_path_factory.mktemp("images")
    rows = []
    for number, pixels in enumerate(
        numpy.random.default_rng(0).integers(0, 255, (8, 16, 16, 3), dtype=numpy.uint8)
    ):
        name = f"{number}.png"
        Image.fromarray(pixels).save(folder / name)
        rows.append({"file_name": name, "text": "a b c", "conditioning_image_file_name": name})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def unconditional(folder, pipeline):
    unet().save_config(folder / "unet")
    options = ["--resolution=8", "--use_ema", "--ddpm_num_steps=10", "--ddpm_num_inference_steps=2"]
    # At the end of an epoch: in a loaded one the script skips batches, which the loader has left out already.
    options += [f"--model_config_name_or_path={folder / 'unet'}", "--checkpointing_steps=2"]
    return options, ["--num_epochs=2"], ["--num_epochs=3"]


def lora(folder, pipeline):
    options = ["--resolution=16", "--rank=2", "--caption_column=text", "--checkpointing_steps=3"]
    return (
        [f"--pretrained_model_name_or_path={pipeline}", *options],
        ["--max_train_steps=4"],
        ["--max_train_steps=6"],
    )


def controlnet(folder, pipeline):
    denoiser = diffusers.UNet2DConditionModel.from_pretrained(pipeline, subfolder="unet")
    # The coder of the pipeline halves an image once.
    net = diffusers.ControlNetModel.from_unet(denoiser, conditioning_embedding_out_channels=(4, 8))
    net.save_pretrained(folder / "net")
    options, *lengths = lora(folder, pipeline)
    options.remove("--rank=2")
    columns = ["--image_column=image", "--conditioning_image_column=conditioning_image"]
    return [*options, *columns, f"--controlnet_model_name_or_path={folder / 'net'}"], *lengths


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "arguments", "last"),
    [
        ("unconditional_image_generation/train_unconditional.py", unconditional, 4),
        ("text_to_image/train_text_to_image_lora.py", lora, 3),
        ("controlnet/train_controlnet.py", controlnet, 3),
    ],
)
def test_example_script(script, arguments, last, images, pipeline, tmp_path):
    """Unmodified, on two processes: 4 steps of 2 epochs, then from the last checkpoint to step 6."""
    path = next(Path(sys.prefix).glob(f"diffusers-*/examples/{script}"), None)
    if path is None:
        pytest.skip("needs the example scripts of diffusers, which `make test-clients` downloads")
    options, first, longer = arguments(tmp_path, pipeline[0])
    output = tmp_path / "output"
    command = [
        *machines.LAUNCH, "--num_processes=2", Path(__file__).with_name("diffusers_script.py"), path, *options,
        f"--train_data_dir={images}", f"--cache_dir={tmp_path / 'cache'}", f"--output_dir={output}",
        "--train_batch_size=2",
    ]  # fmt: skip
    env = {**machines.clean_environment(tmp_path), "HF_HUB_OFFLINE": "1"}
    engines.run([*command, *first], env, tmp_path)
    printed = engines.run([*command, *longer, "--resume_from_checkpoint=latest"], env, tmp_path)
    assert f"Resuming from checkpoint checkpoint-{last}\n" in printed
    session = json.loads((output / "checkpoint-6" / "session.json").read_text())
    # A step of training is one of the schedule for each process.
    assert session["progress"]["step"] == 6 and session["schedulers"][0]["last_epoch"] == 12


@pytest.mark.parametrize("nproc", [1, 2])
def test_recipe(nproc, ranks):
    outputs = ranks(nproc).run(output_of, RECIPE, env={"ACCELERATE_USE_CPU": "true"})
    losses = [float(line.split()[-1]) for line in outputs[0].splitlines()]
    # With both numbers of processes.
    assert losses == pytest.approx([0.5445, 0.3340, 0.2963], abs=2e-3)
