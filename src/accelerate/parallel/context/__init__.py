# SPDX-License-Identifier: Apache-2.0
"""One sequence over several ranks: ring, all-gather and all-to-all attention."""
