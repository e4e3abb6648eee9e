# SPDX-License-Identifier: Apache-2.0
"""The ledger of a run: which samples each optimizer step has read, its audit, and the replay of a step."""
