# SPDX-License-Identifier: Apache-2.0
"""Validated data, never runtime: one dataclass a subject."""
