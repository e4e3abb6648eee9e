# SPDX-License-Identifier: Apache-2.0
"""One sequence over several ranks: ring and all-gather attention (context parallel), all-to-all (sequence parallel)."""
