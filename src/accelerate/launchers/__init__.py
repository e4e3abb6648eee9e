# SPDX-License-Identifier: Apache-2.0
"""From a launch specification to running processes. Importing this starts nothing and imports no torch."""
