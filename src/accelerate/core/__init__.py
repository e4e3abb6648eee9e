# SPDX-License-Identifier: Apache-2.0
"""The ground floor: environment, enums, devices, trees, files, errors. No torch.distributed, no other room."""
