# SPDX-License-Identifier: Apache-2.0
"""What a training step needs before it runs: memory, time and messages of each layout, from a step on fake tensors."""
