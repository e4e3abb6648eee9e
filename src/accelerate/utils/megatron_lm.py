# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.megatron_lm`: Megatron-LM. Re-exports only, by home."""

from ..core.lazy import attach

# Names of `accelerate.utils` too, where `prepare_data_loader` would be that of `accelerate.data_loader`.
CLASSES = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "T5TrainStep",
]
EXPORTS = {"parallel.placeholders": [*CLASSES, "prepare_data_loader"]}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
