# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.tracking. Change the table, then run the script.

from . import registry as registry
from .aim import AimTracker as AimTracker
from .base import GeneralTracker as GeneralTracker
from .base import logger as logger
from .base import on_main_process as on_main_process
from .clearml import ClearMLTracker as ClearMLTracker
from .comet_ml import CometMLTracker as CometMLTracker
from .dvclive import DVCLiveTracker as DVCLiveTracker
from .local import LocalTracker as LocalTracker
from .local import read_values as read_values
from .mlflow import MLflowTracker as MLflowTracker
from .registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from .registry import filter_trackers as filter_trackers
from .registry import get_available_trackers as get_available_trackers
from .registry import register_tracker_class as register_tracker_class
from .registry import start_trackers as start_trackers
from .swanlab import SwanLabTracker as SwanLabTracker
from .tensorboard import TensorBoardTracker as TensorBoardTracker
from .trackio import TrackioTracker as TrackioTracker
from .wandb import WandBTracker as WandBTracker

EXPORTS: dict[str, list[str]]
