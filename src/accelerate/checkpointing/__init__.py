# SPDX-License-Identifier: Apache-2.0
"""Layout, contents and commit of a run's saved state.

    save_run(run: RunState, folder, *, process, options=Options(), writer=None) -> Path
    load_run(run, folder, *, process, strict=True, allow_pickle=False, models_only=False) -> LoadReport
    load_newest(run, directory, *, process, ...) -> LoadReport      # skips and reports damaged ones
    resume(run, directory, *, process, ...) -> LoadReport | None    # None where there is no checkpoint yet
    verify(folder) -> Manifest                                      # raises CorruptCheckpoint with the files' names

Functions take what they need (a `RunState` of references, a process that knows its rank), never the facade. Every rank
calls them; they agree through the process group's store, so a rank that does not call is named within seconds.
"""

from ..core.lazy import attach

EXPORTS = {
    "checkpointing.layout": [
        "CheckpointMismatch",
        "CorruptCheckpoint",
        "Manifest",
        "checkpoint_folder",
        "checkpoints_dir",
        "list_checkpoints",
        "newest_valid",
        "read_manifest",
        "rotate",
        "verify",
    ],
    "checkpointing.loading": ["LoadReport", "load_newest", "load_run", "resume"],
    "checkpointing.merging": ["merge_fsdp_weights"],
    "checkpointing.preemption": ["PreemptionWatch"],
    "checkpointing.run_state": ["PendingGradients", "RunState", "check_custom"],
    "checkpointing.pending": ["Options"],
    "checkpointing.saving": ["save_run"],
    "checkpointing.sharded": ["ShardedState"],
    "checkpointing.sharded_api": [
        "load_fsdp_model",
        "load_fsdp_optimizer",
        "save_fsdp_model",
        "save_fsdp_optimizer",
    ],
    "checkpointing.state_functions": [
        "load_accelerator_state",
        "load_custom_state",
        "save_accelerator_state",
        "save_custom_state",
    ],
    "checkpointing.weights": ["load", "save", "save_model"],
    "checkpointing.writer": ["Writer"],
    "parallel.prepared": ["PreparedModel", "PreparedOptimizer"],
    "placement.tied": ["clean_state_dict_for_safetensors"],
}

__getattr__, __dir__, __all__ = attach(__name__, EXPORTS, all_public=True)
