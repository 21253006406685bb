"""Real clusters for the tests of this folder, one of one node and one of two, and a namespace for each test."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # nothing of its types

from mig_agent.client import Client
from support.cluster import cluster as clusters
from support.cluster import installed, programs, scheduling
from support.cluster.cluster import Cluster
from support.cluster.space import Space

GPUS = "h100-80gb:1,a30:1"
"""Two models, so that what one offers and the other does not can be told apart: 1g.10gb is the H100's alone."""
GPUS_OF_TWO = {"n1": "a100-40gb:2", "n2": "h100-80gb:2"}
VALUES = {"settings": {"start_deadline": "8s"}}
"""A pod that has to wait asks again sooner than it would, which is all that is different."""
TWO_NODES = {"test_kube_scheduler.py", "test_kubectl_mig.py", "test_scheduler.py", "test_two_nodes.py"}
"""Files whose tests use the cluster of two nodes."""
_HERE = Path(__file__).parent
_numbers = itertools.count(1)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist tells no types
    """Shares files out to processes, each with a cluster of one node; that of two nodes is made by one alone."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "two nodes" if file.rpartition("/")[2] in TWO_NODES else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Return the scheduler for `--dist loadscope`; None for any other."""
    if config.getvalue("dist") != "loadscope":
        return None
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process waits for the other at the end.

    And the first test of a run waits for the cluster and, if it is to be built, for the agent's image.
    """
    items.sort(key=lambda item: item.path.name not in TWO_NODES)
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        if "two_nodes" in getattr(item, "fixturenames", ()) and item.path.name not in TWO_NODES:
            raise pytest.UsageError(f"cannot run {item.nodeid}: {__file__} does not say that it uses two nodes")
        if item.get_closest_marker("timeout") is None:
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
    with _opened(Space(cluster, agent, f"test-{next(_numbers)}")) as opened:
        yield opened


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Cluster]:
    """Another cluster, with an agent on each of its two nodes, n1 and n2, whose GPUs are unlike."""
    folder = Path(tempfile.mkdtemp(prefix="mig-agent-e2e-"))
    cluster = clusters.start(folder, programs.ensure(), nodes=2)
    try:
        for node in cluster.nodes:
            installed.label(cluster, node=node.name)
        installed.install(cluster, installed.load_image(cluster), gpus=GPUS_OF_TWO, values=VALUES)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def listening(two_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The same; its agents listen for schedulers from now on."""
    scheduling.listening(two_nodes, tmp_path_factory.mktemp("listening"))
    return two_nodes


@pytest.fixture(scope="session")
def two_agents(two_nodes: Cluster) -> Iterator[dict[str, Client]]:
    """Clients of the agents on them, by the name of the node."""
    with ExitStack() as stack:
        yield {
            node.name: stack.enter_context(Client(installed.address(two_nodes, node.name), patience=60))
            for node in two_nodes.nodes
        }


@pytest.fixture
def wide_space(two_nodes: Cluster, two_agents: dict[str, Client]) -> Iterator[Space]:
    """A namespace of the test's own over both nodes; the GPUs are empty before and after."""
    first, *others = two_agents
    agents = {name: two_agents[name] for name in others}
    with _opened(Space(two_nodes, two_agents[first], f"test-{next(_numbers)}", agents)) as opened:
        yield opened


@contextmanager
def _opened(space: Space) -> Iterator[Space]:
    space.cluster.check()
    space.open()
    try:
        yield space
    finally:
        space.close()
