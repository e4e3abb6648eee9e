# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.modeling. Change the table, then run the script.

from ..parallel.unwrap import is_peft_model as is_peft_model
from ..placement import logger as logger
from ..placement.align import align_module_device as align_module_device
from ..placement.align import get_state_dict_from_offload as get_state_dict_from_offload
from ..placement.align import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from ..placement.align import has_offloaded_params as has_offloaded_params
from ..placement.device_map import check_device_map as check_device_map
from ..placement.device_map import clean_device_map as clean_device_map
from ..placement.device_map import get_balanced_memory as get_balanced_memory
from ..placement.device_map import get_max_memory as get_max_memory
from ..placement.device_map import infer_auto_device_map as infer_auto_device_map
from ..placement.load import load_checkpoint_in_model as load_checkpoint_in_model
from ..placement.load import load_offloaded_weights as load_offloaded_weights
from ..placement.load import load_state_dict as load_state_dict
from ..placement.sizes import _get_proper_dtype as _get_proper_dtype
from ..placement.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from ..placement.sizes import compute_module_sizes as compute_module_sizes
from ..placement.sizes import compute_module_total_buffer_size as compute_module_total_buffer_size
from ..placement.sizes import convert_file_size_to_int as convert_file_size_to_int
from ..placement.sizes import dtype_byte_size as dtype_byte_size
from ..placement.sizes import get_max_layer_size as get_max_layer_size
from ..placement.sizes import get_module_size_with_ties as get_module_size_with_ties
from ..placement.sizes import get_non_persistent_buffers as get_non_persistent_buffers
from ..placement.sizes import named_module_tensors as named_module_tensors
from ..placement.tensors import set_module_tensor_to_device as set_module_tensor_to_device
from ..placement.tied import check_tied_parameters_in_config as check_tied_parameters_in_config
from ..placement.tied import check_tied_parameters_on_same_device as check_tied_parameters_on_same_device
from ..placement.tied import find_tied_parameters as find_tied_parameters
from ..placement.tied import id_tensor_storage as id_tensor_storage
from ..placement.tied import retie_parameters as retie_parameters
from ..precision.amp import get_grad_scaler as get_grad_scaler
from ..precision.amp import get_mixed_precision_context_manager as get_mixed_precision_context_manager

EXPORTS: dict[str, list[str]]
