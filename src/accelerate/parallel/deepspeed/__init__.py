# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO engine as a strategy."""
