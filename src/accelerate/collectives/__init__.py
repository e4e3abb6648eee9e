# SPDX-License-Identifier: Apache-2.0
"""Gather, broadcast, reduce, pad and objects on nested tensors: one message each."""
