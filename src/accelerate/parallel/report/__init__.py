# SPDX-License-Identifier: Apache-2.0
"""What a layout became: parameters, memory and communication volume, for `Accelerator.explain`."""
