# SPDX-License-Identifier: Apache-2.0
"""ZeRO 1 and 2 connect parameters to their optimizer state once, even if only some groups have state by then."""

import inspect

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

link = inspect.getsource(DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state)
public = [name for name in dir(DeepSpeedZeroOptimizer) if "link" in name and name[0] != "_"]
if "if not self._hp_optimizer_states_linked" in link and not public:
    raise SystemExit(
        "DeepSpeedZeroOptimizer links the state of its optimizer in its first step, and has no public method to link "
        f"the state that was loaded or made later:\n{link}"
    )
