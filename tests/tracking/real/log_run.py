# SPDX-License-Identifier: Apache-2.0
"""A short run that logs to one tracker and ends in one of several ways: `log_run.py TRACKER FOLDER ENDING`."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from accelerate import Accelerator

CONFIG = {
    "lr": torch.tensor(0.5),
    "name": "digits",
    "model": {"width": 64, "betas": [0.9, 0.99]},
    "path": Path("a/b"),
}
STEPS = 4


def arguments(name: str, folder: Path) -> dict[str, object]:
    """Arguments with which the package writes below `folder` and needs no account."""
    if name == "wandb":
        return {"mode": "offline", "dir": str(folder), "settings": {"console": "off"}}
    if name == "comet_ml":
        import comet_ml

        return {
            "online": False,
            "experiment_config": comet_ml.ExperimentConfig(offline_directory=str(folder)),
        }
    if name == "dvclive":
        return {"dir": str(folder / "live"), "save_dvc_exp": False, "report": None, "dvcyaml": None}
    if name == "swanlab":
        return {"mode": "local", "logdir": str(folder)}
    if name == "clearml":
        import clearml

        clearml.Task.set_offline(offline_mode=True)
        (folder / "requirements.txt").touch()
        # Without a file ClearML analyses all installed packages, which takes minutes.
        clearml.Task.force_requirements_env_freeze(True, str(folder / "requirements.txt"))
        return {"auto_connect_frameworks": False, "auto_resource_monitoring": False}
    if name == "aim":
        return {"system_tracking_interval": None, "capture_terminal_logs": False}
    return {}


def log_media(name: str, tracker: object) -> None:
    """Log an image with a bright upper half, and a table."""
    image = np.zeros((8, 6, 3), dtype=np.uint8)
    image[:4] = 255
    if name == "tensorboard":
        tracker.log_images({"picture": image[None]}, step=1, dataformats="NHWC")
    elif name in ("wandb", "swanlab"):
        tracker.log_images({"picture": [image]}, step=STEPS)
    elif name == "aim":
        from PIL import Image

        tracker.log_images({"picture": (Image.fromarray(image), "half")}, step=1)
    elif name == "clearml":
        tracker.log_images({"picture": image}, step=1)
    elif name == "mlflow":
        from matplotlib.figure import Figure

        figure = Figure()
        figure.subplots().imshow(image)
        tracker.log_figure(figure, "picture.png")
    if name in ("wandb", "clearml"):
        tracker.log_table(
            "answers", columns=["question", "answer"], data=[["6 x 7", 42]], step=STEPS
        )


def main(name: str, folder: Path, ending: str) -> None:
    """Log `STEPS` values of each kind, then end the run."""
    # A shell starts processes in the background with this signal ignored, and Python leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=str(folder))
    ending, _, background = ending.partition("-")
    accelerator.init_trackers(
        "project", CONFIG, {name: arguments(name, folder)}, background=bool(background)
    )
    for step in range(STEPS):
        loss = torch.tensor(1.0 / (step + 1), requires_grad=True)
        accelerator.log({"loss": loss, "count": np.int64(10 * step), "flag": True}, step=step)
    if ending == "media":
        log_media(name, accelerator.get_tracker(name))
    # What a crash would lose, if it were only buffered.
    accelerator.log({"tail": 7.0}, step=STEPS + 1)
    print("logged", flush=True)
    if ending in ("end", "media"):
        accelerator.end_training()
    elif ending == "error":
        raise RuntimeError("the run's own error")
    elif ending == "exit":
        sys.exit(3)
    elif ending == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
