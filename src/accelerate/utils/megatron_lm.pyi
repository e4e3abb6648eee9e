# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.megatron_lm. Change the table, then run the script.

from ..collectives.tensors import avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group
from ..parallel.placeholders import AbstractTrainStep as AbstractTrainStep
from ..parallel.placeholders import BertTrainStep as BertTrainStep
from ..parallel.placeholders import GPTTrainStep as GPTTrainStep
from ..parallel.placeholders import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from ..parallel.placeholders import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from ..parallel.placeholders import T5TrainStep as T5TrainStep
from ..parallel.placeholders import add_model_config_to_megatron_parser as add_model_config_to_megatron_parser
from ..parallel.placeholders import prepare_data_loader as prepare_data_loader

EXPORTS: dict[str, list[str]]
