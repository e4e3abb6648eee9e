# SPDX-License-Identifier: Apache-2.0
"""Whether a script trains the same model in a layout as on one process: recorded runs of it, and their comparison."""
