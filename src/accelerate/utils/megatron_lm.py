# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.megatron_lm`: Megatron-LM. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "parallel.placeholders": [
        "AbstractTrainStep",
        "BertTrainStep",
        "GPTTrainStep",
        "MegatronLMDummyDataLoader",
        "MegatronLMDummyScheduler",
        "T5TrainStep",
        "prepare_data_loader",
    ],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
