# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.megatron_lm. Change the table, then run the script.

from ..parallel.megatron import AbstractTrainStep as AbstractTrainStep
from ..parallel.megatron import BertTrainStep as BertTrainStep
from ..parallel.megatron import GPTTrainStep as GPTTrainStep
from ..parallel.megatron import T5TrainStep as T5TrainStep
from ..parallel.megatron import prepare_data_loader as prepare_data_loader
from ..parallel.placeholders import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from ..parallel.placeholders import MegatronLMDummyScheduler as MegatronLMDummyScheduler

EXPORTS: dict[str, list[str]]
