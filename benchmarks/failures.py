# SPDX-License-Identifier: Apache-2.0
"""What happens when a run goes wrong: a save that is killed, a killed rank, a rank that does not come, a wrong call.

And where a save into a bucket goes (the bucket is one of the test server), a damaged file, and an index of weights
that leads out of its folder.

    python benchmarks/failures.py --peer PYTHON

Each program below runs with this package and with the peer. On CPUs the peer's launcher starts one process, so
torchrun starts its programs of two ranks. The last lines of each output are shown, and how long the program ran.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))
from s3_server import S3Server

BEGIN = "import os, signal, torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
SAVE = """
model = torch.nn.ModuleList(torch.nn.Linear(4096, 4096, bias=False) for _ in range(3))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
"""
PROGRAMS = {
    "save.py": f"""{BEGIN}{SAVE}
for value in (1.0, 2.0):
    with torch.no_grad():
        for tensor in (*model.parameters(), *moments):
            tensor.fill_(value)
    print("saving", value, flush=True)
    accelerator.save_state("checkpoint")
print("saved", flush=True)
""",
    "load.py": f"""{BEGIN}{SAVE}
accelerator.load_state("checkpoint")
moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
weights = {{parameter[0, 0].item() for parameter in model.parameters()}}
print("loaded weights", weights, "and moments", {{moment[0, 0].item() for moment in moments}})
""",
    "bucket.py": BEGIN
    + """
accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.save_state("s3://bucket/run")
folders = [name for name in os.listdir() if name.startswith("s3:")]
print("saved; local folders:", folders or "none")
""",
    "damaged.py": f"""{BEGIN}{SAVE}
accelerator.save_state("damaged")
(path,) = (name for name in os.listdir("damaged") if name.startswith("model") and name.endswith(".safetensors"))
with open(os.path.join("damaged", path), "r+b") as file:
    file.seek(-1, os.SEEK_END)
    file.write(b"\x7f")
accelerator.load_state("damaged")
print("loaded; the last weight is", list(model.parameters())[-1][-1, -1].item())
""",
    "index.py": """
import json, os, torch
from accelerate import load_checkpoint_in_model
from safetensors.torch import save_file
os.makedirs("weights", exist_ok=True)
save_file({"weight": torch.full((4, 4), 7.0)}, "elsewhere.safetensors")
index = {"metadata": {}, "weight_map": {"weight": "../elsewhere.safetensors"}}
with open("weights/model.safetensors.index.json", "w") as file:
    json.dump(index, file)
model = torch.nn.Linear(4, 4, bias=False)
load_checkpoint_in_model(model, "weights")
print("loaded from outside of the folder:", model.weight[0, 0].item())
""",
    "processes.py": BEGIN
    + 'print("rank", accelerator.process_index, "of", accelerator.num_processes)\n',
    "killed_rank.py": f"""{BEGIN}
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(512, 8), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(loader):
    accelerator.backward(model(batch).mean())
    optimizer.step()
    if step == 5 and accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
""",
    "hang.py": f"""{BEGIN}
def evaluate():
    while True:
        sum(range(1000))
if accelerator.process_index == 1:
    evaluate()
accelerator.wait_for_everyone()
""",
    "mismatch.py": f"""{BEGIN}
if accelerator.is_main_process:
    accelerator.gather(torch.ones(4))
else:
    accelerator.reduce(torch.ones(4, dtype=torch.float64))
""",
    "shapes.py": BEGIN + "accelerator.gather(torch.ones(4 - accelerator.process_index))\n",
}
TWO_RANKS = {
    "killed_rank.py": 60,
    "mismatch.py": 60,
    "shapes.py": 60,
    "hang.py": 75,
}  # seconds to wait


def show(title: str, command: list[str], folder: str, limit: float) -> None:
    """Run a command and print the end of what it printed."""
    begin = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            end = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.terminate()
            output, end = process.communicate()[0], f"still running after {limit:.0f} s"
    lines = [line for line in output.splitlines() if line.strip()]
    print(f"### {title}: {end}, {time.monotonic() - begin:.1f} s, {len(lines)} lines\n")
    print("\n".join(f"    {line[:240]}" for line in lines[-16:]), flush=True)


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HOME": tempfile.gettempdir(),
        "CUDA_VISIBLE_DEVICES": "",
    }


def kill_a_save(python: str, folder: str, seconds: float) -> None:
    """Kill the process that many seconds after its second save has begun, and load what it has left."""
    with subprocess.Popen(
        [python, "save.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "saving 2.0":
                break
        time.sleep(seconds)
        process.kill()
        ended = "after" if "saved" in process.stdout.read() else "during"
    done = subprocess.run(
        [python, "load.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    print(
        f"    killed {ended} the second save ({seconds} s):",
        (done.stdout or done.stderr[-200:]).strip(),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peer", help="Python interpreter of the environment with the peer")
    args = parser.parse_args()
    for package, python in (("ours", sys.executable), ("peer", args.peer)):
        if python is None:
            continue
        python = os.path.abspath(python)
        folder_of_programs = Path(python).parent
        launch = [str(folder_of_programs / "accelerate"), "launch", "--cpu", "--num_processes", "2"]
        torchrun = [str(folder_of_programs / "torchrun"), "--standalone", "--nproc_per_node", "2"]
        with tempfile.TemporaryDirectory() as folder:
            for name, text in PROGRAMS.items():
                (Path(folder) / name).write_text(text)
            print(f"## {package}\n\n### a save over a checkpoint is killed\n")
            for seconds in (0.2, 0.35, 0.5, 0.65, 0.8):
                kill_a_save(python, folder, seconds)
            with S3Server() as server:
                show('save_state("s3://bucket/run")', [python, "bucket.py"], folder, 60)
                print(f"\n    objects in the bucket: {len(server.keys())}")
            show("one byte of a checkpoint has changed", [python, "damaged.py"], folder, 60)
            show("an index names ../elsewhere.safetensors", [python, "index.py"], folder, 60)
            show("launch --num_processes 2", [*launch, "processes.py"], folder, 60)
            for name, limit in TWO_RANKS.items():
                show(name, [*(launch if package == "ours" else torchrun), name], folder, limit)


if __name__ == "__main__":
    main()
