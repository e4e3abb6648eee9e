# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed has no public way to ask whether its optimizer keeps fp32 weights of a parameter."""

import inspect

import deepspeed.utils
from deepspeed.utils import safe_get_full_fp32_param

body = inspect.getsource(safe_get_full_fp32_param)
public = [name for name in dir(deepspeed.utils) if name.startswith(("has_", "is_"))]
if "_hp_mapping" in body and not public:
    raise SystemExit(
        "safe_get_full_fp32_param looks for `_hp_mapping` on a parameter, gathers its weights on "
        f"all ranks, and returns None only then; deepspeed.utils has no test for it:\n{body}"
    )
