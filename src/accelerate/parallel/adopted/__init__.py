# SPDX-License-Identifier: Apache-2.0
"""Models that are sharded when they are given to `prepare`."""
