# SPDX-License-Identifier: Apache-2.0
"""A schedule with several FSDP2 stages on a rank reshards each between its backwards, and no option keeps them."""

import inspect

from torch.distributed.pipelining import ScheduleInterleaved1F1B, schedules

options = set(inspect.signature(ScheduleInterleaved1F1B.__init__).parameters)
options |= set(inspect.signature(ScheduleInterleaved1F1B.step).parameters)
executor = inspect.getsource(schedules._PipelineScheduleRuntime)
if "submodule.reshard()" in executor and not any("shard" in option for option in options):
    raise SystemExit(
        "the executor of schedules calls reshard() for each RESHARD action, and none of the options "
        f"{sorted(options)} keeps stages unsharded until the end of the batch"
    )
