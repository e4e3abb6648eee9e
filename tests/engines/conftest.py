# SPDX-License-Identifier: Apache-2.0
"""Clusters that live as long as the tests of engines do."""

import pytest
from engines import network_namespaces, ray_cluster, slurm_cluster


@pytest.fixture(scope="session")
def namespaces():
    with network_namespaces() as names:
        yield names


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture(scope="session")
def ray():
    with ray_cluster() as variables:
        yield variables
