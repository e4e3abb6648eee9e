# SPDX-License-Identifier: Apache-2.0
"""Layout, contents and commit of a run's saved state."""
