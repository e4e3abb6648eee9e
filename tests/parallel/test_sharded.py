# SPDX-License-Identifier: Apache-2.0
"""What strategies share in which a process holds only parts of a model."""

import pytest

from accelerate.parallel.sharded import ShardedStrategy
from accelerate.state import PartialState


class Shared(ShardedStrategy):
    name = "shared"
    data_shard = (0, 2)

    def __init__(self):
        """Without a mesh."""


class Alone(Shared):
    data_shard = (0, 1)


@pytest.mark.parametrize("strategy, said", [(Shared(), 1), (Alone(), 0)])
def test_uneven_inputs_are_not_joined_in_silence(strategy, said, caplog):
    PartialState(cpu=True)
    with strategy.join([], [], even_batches=False):
        pass
    assert caplog.text.count("join_uneven_inputs has no effect under shared") == said
