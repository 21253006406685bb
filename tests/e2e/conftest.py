"""One real cluster for all tests of this folder, and a namespace for each."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.client import Client
from support.cluster import cluster as clusters
from support.cluster import installed, programs
from support.cluster.cluster import Cluster
from support.cluster.space import Space

GPUS = "h100-80gb:1,a30:1"
"""Two models, so that what one offers and the other does not can be told apart: 1g.10gb is the H100's alone."""
VALUES = {"settings": {"start_deadline": "8s"}}
"""A pod that has to wait asks again sooner than it would, which is all that is different."""
_HERE = Path(__file__).parent
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a run waits for the cluster and, if it is to be built, for the agent's image."""
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def bare_cluster() -> Iterator[Cluster]:
    """Kubernetes without the agent."""
    folder = Path(tempfile.mkdtemp(prefix="mig-agent-e2e-"))
    cluster = clusters.start(folder, programs.ensure())
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def cluster(bare_cluster: Cluster) -> Cluster:
    """With the agent on it, installed as a user would."""
    installed.label(bare_cluster)
    installed.install(bare_cluster, installed.load_image(bare_cluster), gpus=GPUS, values=VALUES)
    return bare_cluster


@pytest.fixture(scope="session")
def agent(cluster: Cluster) -> Iterator[Client]:
    """A client of the agent on the node."""
    with Client(installed.address(cluster), patience=60) as client:
        yield client


@pytest.fixture
def space(cluster: Cluster, agent: Client) -> Iterator[Space]:
    """A namespace of the test's own; the GPUs are empty before and after."""
    cluster.node.check()
    space = Space(cluster, agent, f"test-{next(_numbers)}")
    space.open()
    try:
        yield space
    finally:
        space.close()
