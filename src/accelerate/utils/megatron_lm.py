# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.megatron_lm`: Megatron-LM. Re-exports only, by home."""

from ..core.lazy import attach

# Names of `accelerate.utils` too, where `prepare_data_loader` would be that of `accelerate.data_loader`.
SHARED = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "T5TrainStep",
    "add_model_config_to_megatron_parser",
]
EXPORTS = {
    "collectives.tensors": ["avg_losses_across_data_parallel_group"],
    "parallel.placeholders": [*SHARED, "prepare_data_loader"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS)
