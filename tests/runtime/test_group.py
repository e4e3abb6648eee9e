# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
from rank_pool import on_ranks
from states import reset_states

from accelerate.runtime import group
from accelerate.state import PartialState


@on_ranks(2)
def test_groups_follow_each_other_in_one_process():
    """Each has addresses of its own: with those of an ended group, two ranks would wait for each other for ever."""
    for count in range(1, 7):
        state = PartialState(cpu=True)
        value = torch.tensor([count * (state.process_index + 1)])
        dist.all_reduce(value)
        assert int(value) == 3 * count
        group.stop()
        reset_states()
