# SPDX-License-Identifier: Apache-2.0
"""`accelerate.commands.config.cluster`: the questions on processes and machines, under the API's name."""

from .config import get_user_input as get_cluster_input

__all__ = ["get_cluster_input"]
