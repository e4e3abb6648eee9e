# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.deepspeed. Change the table, then run the script.

from ..config.deepspeed import HfDeepSpeedConfig as HfDeepSpeedConfig
from ..config.deepspeed import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from ..parallel.deepspeed.engine import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from ..parallel.deepspeed.engine import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from ..parallel.deepspeed.engine import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from ..parallel.deepspeed.engine import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
from ..parallel.placeholders import DummyOptim as DummyOptim
from ..parallel.placeholders import DummyScheduler as DummyScheduler

EXPORTS: dict[str, list[str]]
