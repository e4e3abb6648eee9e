# SPDX-License-Identifier: Apache-2.0
"""Time and memory of `prepare` on one of many ranks: a Llama with 8 blocks on a fake process group.

    python benchmarks/scale.py --ranks 1024 --tp 8 [--pp 4] [--copies 2]

The other ranks of a fake group do not exist, so one machine is enough. Rank 0 has the largest shards: torch splits a
tensor into equal chunks, and only the last ones may be smaller. The model is built on the meta device. `prepare`
allocates and initializes the shards of this rank. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "parallel"))
from llama import Llama, LlamaConfig


def local_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters that this process has memory for."""
    return sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()
    )


def measure(ranks: int, tp: int, pp: int, copies: int, config: LlamaConfig) -> dict[str, object]:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    from accelerate import Accelerator
    from accelerate.config.fsdp import FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    with torch.device("meta"):
        model = Llama(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    # A bound on the uneven split: tensor-parallel ranks replicate norms, and the last shards may be smaller.
    largest_row = max(math.prod(parameter.shape[1:]) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(
            dp_replicate_size=copies,
            dp_shard_size=ranks // (tp * pp * copies),
            tp_size=tp,
            pp_size=pp,
        ),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_cls_names_to_wrap=["Block"],
        ),
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    seconds = time.perf_counter() - begin
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {
        "name": "prepare on a fake group",
        "ranks": ranks,
        "layout": {
            "dp_replicate": copies,
            "dp_shard": ranks // (tp * pp * copies),
            "tp": tp,
            "pp": pp,
        },
        "seconds": round(seconds, 2),
        "parameters": total,
        "local parameters": local_parameters(model),
        "even share": round(total * copies / ranks),
        "largest row": largest_row,
        "peak bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    config = LlamaConfig(
        vocabulary=32768 * args.width // 2048,
        width=args.width,
        hidden=4 * args.width,
        layers=args.layers,
        heads=16,
        kv_heads=16,
    )
    print(json.dumps(measure(args.ranks, args.tp, args.pp, args.copies, config)))


if __name__ == "__main__":
    main()
