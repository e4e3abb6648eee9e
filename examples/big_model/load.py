# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint in several files into a model that is built without memory, within a budget for each device.

python examples/big_model/load.py --cpu 8MB
accelerate launch --num_processes 2 examples/big_model/load.py
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from plan import Model
from safetensors.torch import save_file

from accelerate import (
    PartialState,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.utils import compute_module_sizes


def save_sharded(model: torch.nn.Module, folder: Path, files: int = 3) -> None:
    """Write a checkpoint as `save_pretrained` does: files of weights, and an index of them."""
    names = list(model.state_dict())
    places = {
        name: f"model-{number % files + 1:05d}-of-{files:05d}.safetensors"
        for number, name in enumerate(names)
    }
    for file in sorted(set(places.values())):
        part = {name: value for name, value in model.state_dict().items() if places[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--cpu", default="8MB", help="main memory for weights; what does not fit stays on disk"
    )
    given = parser.parse_args()
    state = PartialState()
    torch.manual_seed(0)
    plain = Model()
    ids = torch.randint(0, 1000, (2, 16))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_sharded(plain, folder)

        with init_empty_weights():  # shapes without memory
            model = Model()
        accelerators = dict.fromkeys(range(torch.accelerator.device_count()), "2GB")
        device_map = infer_auto_device_map(
            model, max_memory={**accelerators, "cpu": given.cpu}, no_split_module_classes=["Block"]
        )
        model = load_checkpoint_and_dispatch(
            model, folder, device_map=device_map, offload_folder=folder / "offload"
        )

        sizes = compute_module_sizes(plain)
        for module, device in device_map.items():
            state.print(f"{module:10} {sizes[module] / 2**20:5.2f} MiB on {device}")
        with torch.no_grad():
            difference = (model(ids).cpu() - plain(ids)).abs().max().item()
        state.print(f"outputs differ from the plain model by {difference:.1e}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
