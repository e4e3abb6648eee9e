# SPDX-License-Identifier: Apache-2.0
"""The version of this package, defined only here."""

__version__ = "2.0.0.dev0"
