# SPDX-License-Identifier: Apache-2.0
"""The contract of ParallelStyle, documented as apply, is the private method _apply."""

from torch.distributed.tensor.parallel import ParallelStyle

if ParallelStyle.__abstractmethods__ == {"_apply"}:
    raise SystemExit("a style of one's own overrides _apply, a private name")
