# SPDX-License-Identifier: Apache-2.0
"""The compatibility wing: re-exports grouped by home."""
