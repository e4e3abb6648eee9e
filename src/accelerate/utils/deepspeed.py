# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.deepspeed`: DeepSpeed. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "config.deepspeed": ["HfDeepSpeedConfig", "get_active_deepspeed_plugin"],
    "parallel.deepspeed.engine": [
        "DeepSpeedEngineWrapper",
        "DeepSpeedOptimizerWrapper",
        "DeepSpeedSchedulerWrapper",
        "map_pytorch_optim_to_deepspeed",
    ],
    "parallel.placeholders": ["DummyOptim", "DummyScheduler"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
