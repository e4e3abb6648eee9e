# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.checkpointing. Change the table, then run the script.

from ..parallel.prepared import PreparedModel as PreparedModel
from ..parallel.prepared import PreparedOptimizer as PreparedOptimizer
from ..placement.tied import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from .layout import CheckpointMismatch as CheckpointMismatch
from .layout import CorruptCheckpoint as CorruptCheckpoint
from .layout import Manifest as Manifest
from .layout import checkpoint_folder as checkpoint_folder
from .layout import checkpoints_dir as checkpoints_dir
from .layout import list_checkpoints as list_checkpoints
from .layout import newest_valid as newest_valid
from .layout import read_manifest as read_manifest
from .layout import rotate as rotate
from .layout import verify as verify
from .loading import LoadReport as LoadReport
from .loading import load_newest as load_newest
from .loading import load_run as load_run
from .loading import resume as resume
from .merging import merge_fsdp_weights as merge_fsdp_weights
from .pending import Options as Options
from .preemption import PreemptionWatch as PreemptionWatch
from .run_state import PendingGradients as PendingGradients
from .run_state import RunState as RunState
from .run_state import check_custom as check_custom
from .saving import save_run as save_run
from .sharded import ShardedState as ShardedState
from .sharded_api import load_fsdp_model as load_fsdp_model
from .sharded_api import load_fsdp_optimizer as load_fsdp_optimizer
from .sharded_api import save_fsdp_model as save_fsdp_model
from .sharded_api import save_fsdp_optimizer as save_fsdp_optimizer
from .state_functions import load_accelerator_state as load_accelerator_state
from .state_functions import load_custom_state as load_custom_state
from .state_functions import save_accelerator_state as save_accelerator_state
from .state_functions import save_custom_state as save_custom_state
from .weights import load as load
from .weights import save as save
from .weights import save_model as save_model
from .writer import Writer as Writer

EXPORTS: dict[str, list[str]]
