# SPDX-License-Identifier: Apache-2.0
"""What the engine's frameworks share."""
