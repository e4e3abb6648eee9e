# SPDX-License-Identifier: Apache-2.0
"""Replicated data parallelism: torch's DistributedDataParallel, its communication hooks, and torch_xla."""
