# SPDX-License-Identifier: Apache-2.0
"""What a forward and a backward compute in."""
