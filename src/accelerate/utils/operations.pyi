# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.utils.operations. Change the table, then run the script.

from ..collectives.objects import broadcast_object_list as broadcast_object_list
from ..collectives.objects import gather_object as gather_object
from ..collectives.padding import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from ..collectives.padding import pad_across_processes as pad_across_processes
from ..collectives.padding import pad_input_tensors as pad_input_tensors
from ..collectives.tensors import TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE
from ..collectives.tensors import TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT
from ..collectives.tensors import TensorInformation as TensorInformation
from ..collectives.tensors import broadcast as broadcast
from ..collectives.tensors import copy_tensor_to_devices as copy_tensor_to_devices
from ..collectives.tensors import gather as gather
from ..collectives.tensors import gather_tensor_shape as gather_tensor_shape
from ..collectives.tensors import get_data_structure as get_data_structure
from ..collectives.tensors import initialize_tensors as initialize_tensors
from ..collectives.tensors import is_tensor_information as is_tensor_information
from ..collectives.tensors import reduce as reduce
from ..collectives.verify import chained_operation as chained_operation
from ..collectives.verify import verify_operation as verify_operation
from ..core.errors import DistributedOperationException as DistributedOperationException
from ..core.trees import concatenate as concatenate
from ..core.trees import convert_to_fp32 as convert_to_fp32
from ..core.trees import find_batch_size as find_batch_size
from ..core.trees import find_device as find_device
from ..core.trees import get_shape as get_shape
from ..core.trees import honor_type as honor_type
from ..core.trees import ignorant_find_batch_size as ignorant_find_batch_size
from ..core.trees import is_namedtuple as is_namedtuple
from ..core.trees import is_torch_tensor as is_torch_tensor
from ..core.trees import listify as listify
from ..core.trees import recursively_apply as recursively_apply
from ..core.trees import send_to_device as send_to_device
from ..core.trees import slice_tensors as slice_tensors
from ..parallel.deepspeed.state import GatheredParameters as GatheredParameters
from ..precision.amp import ConvertOutputsToFp32 as ConvertOutputsToFp32
from ..precision.amp import convert_outputs_to_fp32 as convert_outputs_to_fp32

EXPORTS: dict[str, list[str]]
