# SPDX-License-Identifier: Apache-2.0
"""A shard that has a piece of each part of a fused matrix has no public placement."""

import torch.distributed.tensor as public
from torch.distributed.tensor.placement_types import _StridedShard

placement = _StridedShard(0, split_factor=3)
if not hasattr(public, "StridedShard") and not placement.is_shard():
    raise SystemExit(f"{placement} is no Shard, and torch.distributed.tensor has no public class")
if not hasattr(public, "StridedShard"):
    raise SystemExit(f"{placement} counts as a Shard: one block for public names, which it is not")
