# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: plans, split layers, random number streams and the loss over split logits."""
