# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.fsdp_utils. Change the table, then run the script.

from ..checkpointing.merging import merge_fsdp_weights as merge_fsdp_weights
from ..checkpointing.sharded_api import _get_model_state_dict as _get_model_state_dict
from ..checkpointing.sharded_api import _set_model_state_dict as _set_model_state_dict
from ..checkpointing.sharded_api import load_fsdp_model as load_fsdp_model
from ..checkpointing.sharded_api import load_fsdp_optimizer as load_fsdp_optimizer
from ..checkpointing.sharded_api import save_fsdp_model as save_fsdp_model
from ..checkpointing.sharded_api import save_fsdp_optimizer as save_fsdp_optimizer
from ..parallel.fsdp.by_hand import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
from ..parallel.fsdp.by_hand import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from ..parallel.fsdp.by_hand import ensure_weights_retied as ensure_weights_retied
from ..parallel.fsdp.by_hand import fsdp2_apply_ac as fsdp2_apply_ac
from ..parallel.fsdp.by_hand import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from ..parallel.fsdp.by_hand import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from ..parallel.fsdp.by_hand import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
from ..parallel.fsdp.by_hand import fsdp2_prepare_model as fsdp2_prepare_model
from ..parallel.fsdp.by_hand import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from ..parallel.fsdp.by_hand import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from ..parallel.fsdp.units import get_parameters_from_modules as get_parameters_from_modules

EXPORTS: dict[str, list[str]]
