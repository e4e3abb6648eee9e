# SPDX-License-Identifier: Apache-2.0
"""Who am I, whom do I talk to: topology, process group, mesh, plan."""
