# SPDX-License-Identifier: Apache-2.0
"""Clusters that live as long as the tests of engines do; what must run in one worker of pytest-xdist."""

import pytest
from engines import network_namespaces, ray_cluster, slurm_cluster

CLUSTERS = ("ray", "slurm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A cluster is started once.
    for item in items:
        for cluster in CLUSTERS:
            if cluster in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(cluster))


@pytest.fixture(scope="session")
def namespaces():
    with network_namespaces() as prefixes:
        yield prefixes


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture(scope="session")
def ray():
    with ray_cluster() as variables:
        yield variables
