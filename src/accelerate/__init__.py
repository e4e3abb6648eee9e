# SPDX-License-Identifier: Apache-2.0
"""Accelerate: five lines make a PyTorch script run on any device and any layout."""

__version__ = "2.0.0.dev0"
