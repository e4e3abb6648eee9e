# SPDX-License-Identifier: Apache-2.0
"""A rank where another one fails: in a checkpoint, a hook, an ordered block. All hear of it; then the run goes on.

Arguments: a folder.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.collectives import gather_object
from accelerate.core.errors import CheckpointError, DistributedOperationException

accelerator = Accelerator(cpu=True)
RANK, WORLD, FOLDER = accelerator.process_index, accelerator.num_processes, sys.argv[1]
LAST = WORLD - 1


class Moody:
    """Registered state, which fails on one rank when told to."""

    fails_on = None

    def state_dict(self):
        if self.fails_on == RANK:
            raise ValueError(f"bad state of rank {RANK}")
        return {}

    def load_state_dict(self, state):
        pass


def hook_of(rank):
    def hook(*args):
        if rank == RANK:
            raise ValueError(f"bad hook of rank {rank}")

    return hook


def all_hear(kinds, words, function, own=ValueError):
    """The failing rank may raise its own kind of error; the others one of `kinds`. All name rank and error."""
    try:
        function()
    except (*kinds, own) as error:
        heard = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"rank {RANK} heard nothing")
    everyone = gather_object([heard])
    assert len(everyone) == WORLD and all(words in text for text in everyone), everyone
    assert sum(f"{own.__name__}: " in text[:20] for text in everyone) <= 1, everyone


def ordered():
    with accelerator.main_process_first():
        assert accelerator.is_main_process, "the block must not run after it failed on the first process"
        raise ValueError("bad block")


def main():
    model = nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    moody = Moody()
    accelerator.register_for_checkpointing(moody)
    accelerator.save_state(f"{FOLDER}/good")
    for rank in (0, LAST):
        moody.fails_on = rank
        words = f"rank {rank}: ValueError: bad state of rank {rank}"
        all_hear([CheckpointError], words, lambda: accelerator.save_state(f"{FOLDER}/bad"))
        moody.fails_on = None
        handle = accelerator.register_save_state_pre_hook(hook_of(rank))
        words = f"rank {rank}: ValueError: bad hook of rank {rank}"
        all_hear([CheckpointError], words, lambda: accelerator.save_state(f"{FOLDER}/bad"))
        handle.remove()
        handle = accelerator.register_load_state_pre_hook(hook_of(rank))
        all_hear([CheckpointError], f"bad hook of rank {rank}", lambda: accelerator.load_state(f"{FOLDER}/good"))
        handle.remove()
    all_hear([DistributedOperationException], "bad block", ordered)
    accelerator.load_state(f"{FOLDER}/good")
    accelerator.save_state(f"{FOLDER}/bad")
    accelerator.wait_for_everyone()
    print("all ok", flush=True)


if __name__ == "__main__":
    main()
