# SPDX-License-Identifier: Apache-2.0
"""Events and timings of a run."""
