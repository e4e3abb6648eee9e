# SPDX-License-Identifier: Apache-2.0
"""What an `Accelerator` is composed of: the decisions, the prepared objects, their checkpoints, and the observers."""
