# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.megatron_lm`: Megatron-LM. Re-exports only, by home."""

from ..core.lazy import attach

EXPORTS = {
    "parallel.megatron": [
        "AbstractTrainStep",
        "BertTrainStep",
        "GPTTrainStep",
        "T5TrainStep",
        "prepare_data_loader",
    ],
    "parallel.placeholders": ["MegatronLMDummyDataLoader", "MegatronLMDummyScheduler"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
