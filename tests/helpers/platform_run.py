# SPDX-License-Identifier: Apache-2.0
"""A run on a simulated system: `platform_run.py windows|macos FOLDER`. Imports, training, checkpoints, commands."""

import importlib
import io
import os
import pkgutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import platforms

OPTIONAL = ("deepspeed", "torch_xla")


class Squares:
    """A data set; workers that are spawned import it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        import torch

        return torch.full((2,), float(index))


def import_all():
    import accelerate

    for module in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if "scripts" in module.name or module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] not in OPTIONAL:
                raise


def make_run(folder, **options):
    import torch

    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project, **options)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(accelerator, model, optimizer, loader):
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()


def train_by_hand(epochs):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.utils.data.DataLoader(Squares(), batch_size=4):
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach()


def train_and_save(folder):
    """Three checkpoints, of which two are kept; a fixed folder that is saved into twice; weights."""
    import torch

    run = make_run(folder / "project", telemetry=True)
    accelerator, model, _, _ = run
    for _ in range(3):
        train(*run)
        accelerator.save_state()
    for _ in range(2):
        accelerator.project_configuration.automatic_checkpoint_naming = False
        accelerator.save_state(folder / "fixed")
    weight = model.weight.detach().clone()
    torch.testing.assert_close(weight, train_by_hand(3))
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(folder / "fixed")
    assert torch.equal(model.weight, weight)
    accelerator.save_state(folder / "fixed")
    empty = folder / "empty"
    empty.mkdir()
    accelerator.save_state(empty)
    accelerator.save_state(empty, layout="compat")
    accelerator.save_model(model, folder / "weights")
    accelerator.save_model(model, folder / "weights")
    accelerator.save_model(model, folder / "pickled", safe_serialization=False)
    accelerator.end_training()
    names = sorted(path.name for path in (folder / "project" / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"], names
    leftovers = [path.name for path in folder.rglob(".*")]
    assert not leftovers, leftovers


def resume(folder):
    import torch

    run = make_run(folder / "project")
    accelerator, model, _, _ = run
    report = accelerator.resume()
    assert report is not None
    train(*run)
    torch.testing.assert_close(model.weight.detach(), train_by_hand(4))
    accelerator.save_state(blocking=False)
    accelerator.end_training()


def read_with_workers(folder):
    """Workers are spawned: what is sent to them has to be importable."""
    import torch

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(
        torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=1)
    )
    values = torch.cat([batch[:, 0] for batch in loader]).tolist()
    assert values == [float(index) for index in range(8)], values


def place(folder):
    """Offload to disk, load again, and run over a data set."""
    import torch

    from accelerate import cpu_offload, disk_offload, load_checkpoint_and_dispatch
    from accelerate.inference import map_dataset
    from accelerate.utils import infer_auto_device_map

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    values = torch.ones(1, 2)
    want = model(values)
    torch.save(model.state_dict(), folder / "model.bin")
    infer_auto_device_map(model)
    fresh = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    loaded = load_checkpoint_and_dispatch(
        fresh, folder / "model.bin", {"0": "disk", "1": "cpu"}, offload_folder=folder / "offload"
    )
    torch.testing.assert_close(loaded(values).to(want.device), want)
    disk_offload(model, folder / "offload_2", execution_device=torch.device("cpu"))
    torch.testing.assert_close(model(values), want)
    cpu_offload(torch.nn.Linear(2, 1), torch.device("cpu"))
    map_dataset(
        lambda texts: [len(text) for text in texts], ["a", "bb"], folder / "mapped", batch_size=2
    )


def free_memory(folder):
    """The allocator of the device in the table is emptied."""
    import torch

    from accelerate import Accelerator
    from accelerate.core import devices

    emptied = []
    torch.mps.empty_cache = lambda: emptied.append(True)
    assert devices.select(0, 1) == torch.device("mps", 0)
    Accelerator(cpu=True).free_memory()
    assert emptied


def shard_alone(folder):
    """A layout that needs a process group, on one process."""
    import torch

    from accelerate.core.device_kinds import DEVICES
    from accelerate.runtime import group

    group.start_alone(DEVICES["cpu"])
    assert torch.distributed.get_world_size() == 1
    group.stop()


def command(*arguments):
    """Run a command in this process. Returns what it prints."""
    from accelerate.commands.main import main

    output = io.StringIO()
    sys.argv = ["accelerate", *arguments]
    try:
        with redirect_stdout(output):
            main()
    except SystemExit as end:
        assert end.code in (0, None), (arguments, end.code, output.getvalue())
    return output.getvalue()


def commands(folder):
    from accelerate.commands.main import COMMANDS

    for name in COMMANDS:
        assert "usage" in command(name, "-h"), name
    assert "torch" in command("env").lower()
    file = folder / "config.yaml"
    command("config", "default", "--config_file", str(file))
    assert file.exists()
    shown = command("monitor", "--once", str(folder / "project"))
    assert "step" in shown, shown
    script = folder / "hello.py"
    script.write_text("import accelerate; print('hello')\n")
    launch = ("launch", "--cpu", "--num_processes", "1")
    assert "hello" in command(*launch, str(script))


def launch_watched(folder):
    """One process with a log, and two: each is a child whose output is read."""
    script = folder / "child.py"
    script.write_text("import os; print('rank', os.environ.get('RANK', 0))\n")
    for processes in ("1", "2"):
        logs = folder / f"logs_{processes}"
        options = ("--cpu", "--num_processes", processes, "--log_dir", str(logs))
        command("launch", *options, str(script))
        texts = [path.read_text() for path in sorted(logs.rglob("stdout.log"))]
        assert texts == [f"rank {rank}\n" for rank in range(int(processes))], texts


def meet(folder):
    """The launchers of two machines meet in a store, with fixed ranks and in torch's rendezvous."""
    import threading

    from accelerate.launchers.elastic_agent import open_rendezvous
    from accelerate.launchers.ports import get_free_port
    from accelerate.launchers.shared_store import QUIET
    from accelerate.launchers.spec import RENDEZVOUS_SETTINGS, LaunchSpec, Program
    from accelerate.launchers.static import Machines, open_stores

    os.environ.update(QUIET)
    options = {"num_processes": 2, "num_machines": 2, "nnodes": "2", "rdzv_id": "run"}
    settings = {name: str(value) for name, value in RENDEZVOUS_SETTINGS.items()}
    fixed = get_free_port(), []
    elastic = get_free_port(), []

    def run(machine):
        spec = LaunchSpec(Program("x.py"), machine_rank=machine, **options)
        spec = spec._replace(main_process_port=fixed[0])
        machines = Machines(spec, *open_stores(spec))
        machines.meet(0)
        machines.unfollow()
        machines.close()
        fixed[1].append(machine)
        spec = spec._replace(main_process_port=elastic[0])
        handler = open_rendezvous(spec, "127.0.0.1", settings)
        elastic[1].append(handler.next_rendezvous().rank)
        handler.shutdown()

    threads = [threading.Thread(target=run, args=(machine,)) for machine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(fixed[1]) == sorted(elastic[1]) == [0, 1], (fixed, elastic)


def say_hello(folder):
    Path(folder, f"hello_{os.environ['RANK']}").touch()


def launch_functions(folder):
    from accelerate import debug_launcher

    debug_launcher(say_hello, (str(folder),), num_processes=2)
    assert (folder / "hello_1").exists()


PARTS = {
    "windows": (
        train_and_save, resume, read_with_workers, place, shard_alone, launch_functions, launch_watched, commands,
        meet,
    ),
    "macos": (
        train_and_save, resume, read_with_workers, place, free_memory, launch_functions, launch_watched, commands,
    ),
}  # fmt: skip

if __name__ == "__main__":
    system, folder = sys.argv[1], Path(sys.argv[2])
    getattr(platforms, f"simulate_{system}")()
    failed = []
    for part in (lambda _: import_all(), *PARTS[system]):
        if len(sys.argv) > 3 and part.__name__ not in sys.argv[3:]:
            continue
        try:
            part(folder)
        except BaseException:
            import traceback

            traceback.print_exc()
            failed.append(part.__name__)
    print("failed:", *failed, file=sys.stderr)
    sys.exit(len(failed))
