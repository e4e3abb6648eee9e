# SPDX-License-Identifier: Apache-2.0
"""A process group that DDP's reducer frees waits for its threads, with the interpreter lock that these need."""

import faulthandler
import os
import threading

import torch.distributed as dist
import torch.distributed.nn.functional  # later, it would hold the group

started, proceed = threading.Event(), threading.Event()


def wait_in_thread(future):
    if threading.current_thread() is not threading.main_thread():
        started.set()
        proceed.wait()


if os.fork() == 0:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    group = dist.group.WORLD
    dist.destroy_process_group()
    while not started.wait(0.01):  # until a thread of gloo calls it
        group.allreduce([torch.ones(10)]).get_future().then(wait_in_thread)
    del group, model.process_group, model.logger
    faulthandler.dump_traceback_later(2, exit=True)
    proceed.set()
    del model.reducer
    os._exit(0)
if os.wait()[1]:
    raise SystemExit("the end of a group keeps the interpreter lock while it joins gloo's threads")
