# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: a model cut into stages by its blocks, trained by a loop that does not know it."""
