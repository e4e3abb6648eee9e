# SPDX-License-Identifier: Apache-2.0
"""Scripts that prove an installation; started by `accelerate test`."""
