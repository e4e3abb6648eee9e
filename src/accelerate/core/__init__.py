# SPDX-License-Identifier: Apache-2.0
"""The lowest layer: options, environment, devices, trees, files, errors. It imports no other package of ours."""
