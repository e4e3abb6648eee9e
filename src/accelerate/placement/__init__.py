# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a big model live, and how they get there."""

import logging

from ..logging import rank_0_logger

# One for all modules, so that a script silences them together.
logger: logging.Logger = rank_0_logger(__name__)
