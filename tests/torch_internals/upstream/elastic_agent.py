# SPDX-License-Identifier: Apache-2.0
"""A subclass of the elastic agent that starts ranks in its own way has to override private methods."""

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

private = sorted(name for name in SimpleElasticAgent.__abstractmethods__ if name.startswith("_"))
if private:
    raise SystemExit(f"there is no public way to override {', '.join(private)}")
