# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: topology, process group, device mesh, and agreement over the store."""
