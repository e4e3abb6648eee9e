# SPDX-License-Identifier: Apache-2.0
"""Profiling a block of code, and progress bars on one process."""
