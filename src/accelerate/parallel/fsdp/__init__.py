# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism: torch's FSDP2 (`fully_shard`) and FSDP1."""
