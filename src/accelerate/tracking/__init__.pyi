# SPDX-License-Identifier: Apache-2.0
# Written by tools/stubs.py from the table of accelerate.tracking. Change the table, then run the script.

from . import registry as registry
from .base import GeneralTracker as GeneralTracker
from .base import logger as logger
from .base import on_main_process as on_main_process
from .clearml import ClearMLTracker as ClearMLTracker
from .clients import AimTracker as AimTracker
from .clients import CometMLTracker as CometMLTracker
from .clients import DVCLiveTracker as DVCLiveTracker
from .clients import SwanLabTracker as SwanLabTracker
from .clients import TrackioTracker as TrackioTracker
from .clients import WandBTracker as WandBTracker
from .local import LocalTracker as LocalTracker
from .local import read_values as read_values
from .mlflow import MLflowTracker as MLflowTracker
from .registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from .registry import filter_trackers as filter_trackers
from .registry import get_available_trackers as get_available_trackers
from .registry import register_tracker_class as register_tracker_class
from .registry import start_trackers as start_trackers
from .tensorboard import TensorBoardTracker as TensorBoardTracker

EXPORTS: dict[str, list[str]]
