# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Transformer Engine 2.9, which needs CUDA: its public names and signatures, in full precision."""
