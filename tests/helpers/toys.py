# SPDX-License-Identifier: Apache-2.0
"""What the tests of clients train: tiny models built from configurations, toy data, and the same in plain PyTorch."""

from __future__ import annotations

import copy
import importlib.metadata
import sys

import torch

LEARNING_RATE = 5e-3


class Sequences(torch.utils.data.Dataset):
    """Ragged sequences of a small grammar, padded; the padding has no loss. `order` lists the rows as read."""

    def __init__(self, count, seed=1, length=16):
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.order = [], []
        for _ in range(count):
            size = int(torch.randint(6, length + 1, (1,), generator=generator))
            start, stride = (int(torch.randint(1, 9, (1,), generator=generator)) for _ in range(2))
            tokens = [(start + stride * i) % 32 for i in range(size)]
            self.rows.append(
                {
                    "input_ids": torch.tensor(tokens + [0] * (length - size)),
                    "attention_mask": torch.tensor([1] * size + [0] * (length - size)),
                    "labels": torch.tensor(tokens + [-100] * (length - size)),
                }
            )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.order.append(index)
        return self.rows[index]


def llama(**options):
    """A Llama of 13 thousand parameters, the same on each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(
        **{
            **sizes,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            **options,
        }
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.loss_function = next_token_loss
    return model


def next_token_loss(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    """The loss of transformers in the dtype of the logits; its own computes in float32."""
    total = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1),
        labels[:, 1:].flatten(),
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return total if num_items_in_batch is None else total / num_items_in_batch


def transformers_4():
    """Whether transformers is version 4, whose options have other names."""
    return importlib.metadata.version("transformers").startswith("4.")


def on_cpu(**variables):
    """The environment of a rank of a client test: the CPU, and no model hub."""
    return {
        "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", **variables,
    }  # fmt: skip


class Iterable(torch.utils.data.IterableDataset):
    """The rows of `Sequences` without a length."""

    def __init__(self, count):
        self.rows = Sequences(count).rows

    def __iter__(self):
        return iter(self.rows)


def StopAfter(steps):
    """A callback that ends the training early, as a killed job would."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= steps
            return control

    return Stop()


def arguments(folder, kind=None, **options):
    """`TrainingArguments` for toys on the CPU."""
    from transformers import TrainingArguments

    settings = {
        "num_train_epochs": 2, "learning_rate": LEARNING_RATE, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0,
    }  # fmt: skip
    return (kind or TrainingArguments)(output_dir=str(folder), **{**settings, **options})


def trained(folder, data, model=None, callbacks=(), resume=None, **options):
    """A `Trainer` that has trained a Llama, or `model`, on `data`."""
    from transformers import Trainer

    trainer = Trainer(
        model=model or llama(),
        args=arguments(folder, **options),
        train_dataset=data,
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def batches_read(data, size, nproc):
    """The global batches of `size` rows that the ranks have read, as row numbers.

    Each rank has read its part of every batch, or the first rank has read all of them.
    """
    from accelerate.utils import gather_object

    orders = gather_object([data.order])
    if not all(orders):
        orders, nproc = [order for order in orders if order], 1
    part = size // nproc
    return [
        [row for order in orders for row in order[start : start + part]]
        for start in range(0, len(orders[0]), part)
    ]


def plain_training(model, batches, accumulation=1, parts=1):
    """The training of `transformers.Trainer` with its defaults, in plain PyTorch.

    Args:
        model: trained in place.
        batches: the global batches, each a list of rows.
        accumulation: global batches per optimizer step.
        parts: equal parts of each batch. A step takes the mean over the parts of each part's mean over its tokens.

    Returns:
        The model.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    windows = [
        batches[start : start + accumulation] for start in range(0, len(batches), accumulation)
    ]
    steps = len(windows)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (steps - step) / steps)
    model.train()
    for window in windows:
        rows = [row for batch in window for row in batch]
        for part in range(parts):
            own = rows[part * len(rows) // parts : (part + 1) * len(rows) // parts]
            (token_mean(model, own, counts_first=transformers_4()) / parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def token_mean(model, rows, counts_first=False):
    """The mean loss over the labels of rows, except the first of a row unless `counts_first`, which has no loss."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    count = int((batch["labels"][:, 0 if counts_first else 1 :] != -100).sum())
    return next_token_loss(logits, batch["labels"], None, count)


def distance(first, second):
    """The largest difference between two state dicts, on the CPU."""
    assert first.keys() == second.keys()
    return max(
        float((a.cpu().double() - second[name].cpu().double()).abs().max())
        for name, a in first.items()
    )


def unsharded_state(trainer):
    """The weights of a trainer's model, of any layout, compiled or not, on each rank."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {
        name.removeprefix("_orig_mod."): value.detach().cpu().clone()
        for name, value in copy.copy(state).items()
    }


def words(start, count):
    """A text of the vocabulary of `word_tokenizer`."""
    return " ".join(f"w{(start + 3 * step) % 29}" for step in range(count))


def word_tokenizer():
    """A tokenizer of 29 words and 3 special tokens: [PAD] is 0, [EOS] is 2, w0 is 3."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[EOS]", *(f"w{number}" for number in range(29))]
    own = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    )
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        unk_token="[UNK]",
        eos_token="[EOS]",
        pad_token="[PAD]",
        padding_side="left",
    )


def sentence_encoder(folder):
    """A sentence encoder of a one-layer BERT, whose vocabulary is w0 to w39. Its parts are saved in a new folder."""
    from safetensors.torch import save_file
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(40))]
    folder.mkdir(parents=True)
    vocabulary = {name: number for number, name in enumerate(names)}
    BertTokenizerFast(vocab=vocabulary, model_max_length=16).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(names), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, architectures=["BertModel"],
    )  # fmt: skip
    # Where a process group exists, save_pretrained writes on rank 0 only.
    (folder / "config.json").write_text(config.to_json_string())
    save_file(BertModel(config).state_dict(), folder / "model.safetensors", {"format": "pt"})
    transformer = models.Transformer(str(folder))
    return SentenceTransformer(modules=[transformer, models.Pooling(16)], device="cpu")


def replace_owner_check():
    """Have sentence-transformers and setfit train, which look for "huggingface" in the home page of `accelerate`.

    This distribution does not claim that page.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(("sentence_transformers", "setfit")) and hasattr(
            module, "is_training_available"
        ):
            module.is_training_available = lambda: True
