# SPDX-License-Identifier: Apache-2.0
"""Samplers, shards, dispatch, prefetch, position in the epoch."""
