# SPDX-License-Identifier: Apache-2.0
"""The version of this package: the one place that says it."""

__version__ = "2.0.0.dev0"
