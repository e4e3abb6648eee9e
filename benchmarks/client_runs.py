# SPDX-License-Identifier: Apache-2.0
"""Runs of client libraries on whichever `accelerate` is imported. `clients.py` starts this script with each package.

Reads one JSON job per line ({"name": ..., "world": ...}), runs it on as many forked processes, and prints one JSON
line: the seconds and the peak memory of rank 0, and numbers by which runs are compared.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import datasets
import diffusers
import diffusers.training_utils
import lm_eval
import peft
import sentence_transformers
import torch
import torch.distributed.fsdp
import transformers
import trl
from diffusers.models.unets import unet_2d  # noqa: F401
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from toys import (
    Sequences,
    arguments,
    llama,
    replace_owner_check,
    sentence_encoder,
    word_tokenizer,
    words,
)
from transformers.models.bert import modeling_bert  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from trl.trainer import dpo_trainer, grpo_trainer, sft_trainer  # noqa: F401

import accelerate
import accelerate.utils

Outcome = tuple[float, list[float]]
STEPS = 40


def model(**options: object) -> torch.nn.Module:
    return llama(**{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, **options})


def timed(work: Callable[[], list[float]]) -> Outcome:
    begin = time.perf_counter()
    found = work()
    return time.perf_counter() - begin, found


def losses(trainer: transformers.Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def trainer(folder: str, world: int, **options: object) -> Outcome:
    settings = {
        "per_device_train_batch_size": 8 // world,
        "num_train_epochs": 1,
        "logging_steps": 10,
        **options,
    }
    made = transformers.Trainer(
        model=model(),
        args=arguments(folder, **settings),
        train_dataset=Sequences(8 * STEPS, length=32),
    )

    def work() -> list[float]:
        made.train()
        return losses(made)

    return timed(work)


def trainer_accumulation(folder: str, world: int) -> Outcome:
    return trainer(
        folder, world, per_device_train_batch_size=4 // world, gradient_accumulation_steps=2
    )


def trainer_fsdp(folder: str, world: int) -> Outcome:
    wrapped = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return trainer(folder, world, fsdp=True, fsdp_config=wrapped)


def trainer_zero(folder: str, world: int) -> Outcome:
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    return trainer(
        folder, world, deepspeed={"zero_optimization": {"stage": 2}, **dict.fromkeys(names, "auto")}
    )


def trainer_save(folder: str, world: int) -> Outcome:
    return trainer(folder, world, save_strategy="steps", save_steps=4, save_total_limit=1)


def evaluation(folder: str, world: int) -> Outcome:
    made = transformers.Trainer(
        model=model(),
        args=arguments(folder, per_device_eval_batch_size=8),
        eval_dataset=Sequences(1200, length=32),
    )
    return timed(lambda: [made.evaluate()["eval_loss"]])


def offloaded(folder: str, world: int) -> Outcome:
    """Load with half of the layers on the disk, then generate."""
    model(num_hidden_layers=8).save_pretrained(folder)
    places = {f"model.layers.{number}": "disk" if number % 2 else "cpu" for number in range(8)}
    places.update(
        {
            "model.embed_tokens": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        }
    )
    tokens = torch.arange(12)[None]

    def work() -> list[float]:
        loaded = transformers.LlamaForCausalLM.from_pretrained(
            folder, device_map=places, offload_folder=f"{folder}/offload"
        )
        return [
            float(token) for token in loaded.generate(tokens, max_new_tokens=30, do_sample=False)[0]
        ]

    return timed(work)


def lora(folder: str, world: int) -> Outcome:
    accelerator = accelerate.Accelerator(cpu=True)
    base = model()
    torch.manual_seed(1)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    loader = torch.utils.data.DataLoader(Sequences(8 * STEPS, length=32), batch_size=8 // world)
    adapted, optimizer, loader = accelerator.prepare(adapted, optimizer, loader)

    def work() -> list[float]:
        found = []
        for batch in loader:
            loss = adapted(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.unwrap_model(adapted).save_pretrained(
            folder, state_dict=accelerator.get_state_dict(adapted)
        )
        return found

    return timed(work)


def trl_options(folder: str, world: int) -> dict[str, object]:
    return {
        "output_dir": folder, "per_device_train_batch_size": 8 // world, "num_train_epochs": 1, "learning_rate": 5e-3,
        "logging_steps": 5, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0,
        "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip


def trained(made: transformers.Trainer) -> Outcome:
    def work() -> list[float]:
        made.train()
        return losses(made)

    return timed(work)


def sft(folder: str, world: int) -> Outcome:
    data = datasets.Dataset.from_dict(
        {"text": [words(row, 20 + row % 7) for row in range(8 * STEPS)]}
    )
    settings = trl.SFTConfig(max_length=32, **trl_options(folder, world))
    return trained(
        trl.SFTTrainer(
            model=model(eos_token_id=2),
            args=settings,
            train_dataset=data,
            processing_class=word_tokenizer(),
        )
    )


def dpo(folder: str, world: int) -> Outcome:
    rows = range(8 * STEPS // 2)
    data = datasets.Dataset.from_dict(
        {
            "prompt": [words(row, 6) for row in rows], "chosen": [words(row + 1, 10) for row in rows],
            "rejected": [words(row + 5, 8) for row in rows],
        }
    )  # fmt: skip
    return trained(
        trl.DPOTrainer(
            model=model(eos_token_id=2), ref_model=model(eos_token_id=2),
            args=trl.DPOConfig(max_length=32, **trl_options(folder, world)), train_dataset=data,
            processing_class=word_tokenizer(),
        )
    )  # fmt: skip


def grpo(folder: str, world: int) -> Outcome:
    home = f"{folder}/model{os.environ.get('RANK', 0)}"
    model(eos_token_id=2).save_pretrained(home, is_main_process=True)
    word_tokenizer().save_pretrained(home)
    settings = trl.GRPOConfig(
        num_generations=4, max_completion_length=8, beta=0.1, **trl_options(folder, world)
    )
    made = trl.GRPOTrainer(
        model=transformers.LlamaForCausalLM.from_pretrained(home), args=settings,
        reward_funcs=lambda completions, **kwargs: [float(len(set(text.split()))) for text in completions],
        train_dataset=datasets.Dataset.from_dict({"prompt": [words(row, 3) for row in range(40)]}),
    )  # fmt: skip
    return trained(made)


def diffusion(folder: str, world: int) -> Outcome:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=16, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    average = diffusers.training_utils.EMAModel(unet.parameters(), decay=0.9)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8 * STEPS, 3, 16, 16, generator=generator)
    steps = torch.randint(0, 100, (len(images),), generator=generator)
    data = torch.utils.data.TensorDataset(
        images, torch.randn(images.shape, generator=generator), steps
    )
    loader = torch.utils.data.DataLoader(data, batch_size=8 // world)
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    noising = diffusers.DDPMScheduler(100)

    def work() -> list[float]:
        found = []
        for image, noise, step in loader:
            with accelerator.accumulate(unet):
                loss = torch.nn.functional.mse_loss(
                    unet(noising.add_noise(image, noise, step), step).sample, noise
                )
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(unet.parameters())
            found.append(accelerator.gather(loss.detach()[None]).mean().item())
        return found

    return timed(work)


def sequential_offload(folder: str, world: int) -> Outcome:
    """A denoiser whose modules are copied in one by one, as `enable_sequential_cpu_offload` does."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=16, layers_per_block=2, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip
    accelerate.cpu_offload(unet, torch.device("cpu"))
    image = torch.ones(1, 3, 16, 16)

    @torch.no_grad()
    def work() -> list[float]:
        found = image
        for step in range(40):
            found = 0.9 * found + 0.1 * unet(found, step).sample
        return [found.sum().item()]

    return timed(work)


def sentences(folder: str, world: int) -> Outcome:
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers import losses as kinds

    encoded = sentence_encoder(Path(folder) / f"encoder{os.environ.get('RANK', 0)}")
    data = datasets.Dataset.from_dict(
        {
            "anchor": [f"w{row % 40} w{(3 * row + 1) % 40}" for row in range(8 * STEPS)],
            "positive": [f"w{(row + 7) % 40} w{(3 * row + 1) % 40}" for row in range(8 * STEPS)],
        }
    )
    settings = SentenceTransformerTrainingArguments(
        output_dir=folder, per_device_train_batch_size=8 // world, num_train_epochs=1, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_steps=5, save_strategy="no", learning_rate=1e-2, seed=0,
    )  # fmt: skip
    loss = kinds.MultipleNegativesRankingLoss(encoded, gather_across_devices=True)
    return trained(
        SentenceTransformerTrainer(model=encoded, args=settings, train_dataset=data, loss=loss)
    )


def scoring(folder: str, world: int) -> Outcome:
    model().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    scorer = HFLM(pretrained=folder, device="cpu", batch_size=8, dtype="float32")
    requests = [Instance("loglikelihood", {}, (words(row, 20), " w1 w2"), 0) for row in range(400)]
    return timed(lambda: [value for value, _ in scorer.loglikelihood(requests, disable_tqdm=True)])


RUNS = {
    run.__name__: run
    for run in (
        trainer, trainer_accumulation, trainer_fsdp, trainer_zero, trainer_save, evaluation, offloaded, lora, sft, dpo,
        grpo, diffusion, sequential_offload, sentences, scoring,
    )
}  # fmt: skip


def rank(number: int, world: int, port: int, name: str, folder: str, answer: int) -> None:
    """Run a job in this forked process, twice; the second run counts."""
    os.environ.update(ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    if world > 1:
        os.environ.update(
            RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    RUNS[name](f"{folder}/first", world)
    seconds, found = RUNS[name](f"{folder}/second", world)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if number == 0:
        os.write(
            answer, json.dumps({"seconds": seconds, "mebibytes": peak, "found": found}).encode()
        )


def run(job: dict) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        children = []
        for number in range(job["world"]):
            if not (child := os.fork()):
                status = 1
                try:
                    for descriptor in (1, 2):
                        os.dup2(log.fileno(), descriptor)
                    rank(number, job["world"], port, job["name"], folder, writer)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        os.close(writer)
        failed = False
        for _ in children:
            _, status = os.wait()
            if status and not failed:
                failed = True
                for child in children:
                    try:
                        os.kill(child, 9)
                    except ProcessLookupError:
                        pass
        with os.fdopen(reader, "rb") as stream:
            content = stream.read()
        if not content:
            log.seek(0)
            return {"error": log.read()[-2000:]}
        return json.loads(content)


def main() -> None:
    replace_owner_check()
    packages = (transformers, peft, trl, diffusers, sentence_transformers, lm_eval)
    versions = {module.__name__: getattr(module, "__version__", "") for module in packages}
    print(json.dumps({"package": accelerate.__file__, "versions": versions}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
