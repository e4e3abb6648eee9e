# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.megatron_lm. Change the table, then run the script.

from ..parallel.placeholders import AbstractTrainStep as AbstractTrainStep
from ..parallel.placeholders import BertTrainStep as BertTrainStep
from ..parallel.placeholders import GPTTrainStep as GPTTrainStep
from ..parallel.placeholders import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from ..parallel.placeholders import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from ..parallel.placeholders import T5TrainStep as T5TrainStep
from ..parallel.placeholders import prepare_data_loader as prepare_data_loader

EXPORTS: dict[str, list[str]]
