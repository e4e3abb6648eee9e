# SPDX-License-Identifier: Apache-2.0
"""The `SFTTrainer` of trl on a tiny model and texts of different lengths."""

import sys
import tempfile
from pathlib import Path

import datasets
import trl
from transformers import set_seed

sys.path.append(str(Path(__file__).parents[2] / "helpers"))
from toys import llama, word_tokenizer, words

set_seed(0)
texts = [words(number, 4 + number % 5) for number in range(32)]
arguments = trl.SFTConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    max_steps=4,
    learning_rate=5e-3,
    max_length=16,
    bf16=False,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trl.SFTTrainer(
    model=llama(eos_token_id=2),
    args=arguments,
    train_dataset=datasets.Dataset.from_dict({"text": texts}),
    processing_class=word_tokenizer(),
).train()
