# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed, imported for the CPU: by the rank server before it forks, or by a rank."""

import os
import warnings

# DeepSpeed chooses its device when it is imported.
os.environ["DS_ACCELERATOR"] = "cpu"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed

# It would compile its own messages through shared memory first, which takes a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
