# SPDX-License-Identifier: Apache-2.0
"""Strategies and transforms: how a model is laid out over processes."""
