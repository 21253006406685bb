"""Pages that `kubectl mig` prints, from the answers of nodes."""

from __future__ import annotations

from dataclasses import replace

from mig_agent.kubectl import cluster_page
from mig_agent.kubectl.answers import NodeAnswer
from mig_agent.migctl.status_page import Page

PAGE = Page(unicode=False)


def test_the_map_has_every_node_and_what_fits_on_all_together(answers: tuple[NodeAnswer, ...]) -> None:
    lines = cluster_page.status_page(answers, PAGE).splitlines()
    assert lines[0] == "3 nodes, 2 GPUs, 2 leases, 1 waiting, no answer from 1 node"
    assert "n1: 1 GPU, 1 lease, 1 waiting (revision 7)" in lines
    assert "n3: its agent's pod is Pending (ErrImagePull)" in lines
    gpus = [line for line in lines if line.startswith("GPU 0")]
    assert "alice" in gpus[0]
    assert gpus[0].index("|") == gpus[1].index("|"), "the maps of all nodes begin in one column"
    assert lines[-1] == "fits now (up to 39.5 GiB), any one of: 7 x 1g.5gb, 10 x 1g.10gb, 1 x 3g.40gb"
    assert sum("leased" in line for line in lines) == 1, "one legend for all"
    assert max(map(len, lines)) <= 80


def test_wide_has_leases_and_the_queue_too(answers: tuple[NodeAnswer, ...]) -> None:
    page = cluster_page.status_page(answers, Page(unicode=False, leases=True))
    assert "l2     carol" in page
    assert "bob" in page


def test_leases_of_all_nodes_are_one_table(answers: tuple[NodeAnswer, ...]) -> None:
    header, first, second = cluster_page.leases_page(answers, PAGE).splitlines()
    assert header.split() == ["NODE", "LEASE", "HOLDER", "GPU", "SLICES", "PROFILE", "AGE", "ENDS", "IN", "NOTE"]
    assert first.split()[:6] == ["n1", "l1", "alice", "0", "0", "1g.10gb"]
    assert second.split()[:3] == ["n2", "l2", "carol"]
    assert second.endswith("unused"), "a column that one node needs is there for all"
    assert cluster_page.troubles(answers) == ["n3: its agent's pod is Pending (ErrImagePull)"]


def test_the_queue_of_all_nodes(answers: tuple[NodeAnswer, ...]) -> None:
    _, waits = cluster_page.queue_page(answers, PAGE).splitlines()
    assert waits.split()[:5] == ["n1", "1", "r", "bob", "7g.80gb"]
    assert cluster_page.queue_page(answers[1:2], PAGE) == "no request waits"
    assert cluster_page.queue_page(answers[1:], PAGE) == "no request waits on nodes that answer"


def test_columns_that_different_nodes_need_are_all_there(answers: tuple[NodeAnswer, ...]) -> None:
    first, second, _ = answers
    assert first.status is not None
    assert second.status is not None
    (waiting,) = first.status.queue
    other = replace(second.status, queue=(replace(waiting, request_id="", priority=7),))
    header, one, two = cluster_page.queue_page((first, replace(second, status=other)), PAGE).splitlines()
    assert header.split()[:6] == ["NODE", "PLACE", "REQUEST", "HOLDER", "WANTS", "PRIORITY"]
    assert one.split()[:5] == ["n1", "1", "r", "bob", "7g.80gb"]
    assert two.split()[:5] == ["n2", "1", "bob", "7g.80gb", "7"]


def test_json_has_each_nodes_status_or_why_there_is_none(answers: tuple[NodeAnswer, ...]) -> None:
    found = cluster_page.encode(answers)
    assert isinstance(found, dict)
    assert isinstance(found["nodes"], list)
    first, _, third = found["nodes"]
    assert isinstance(first, dict)
    assert isinstance(first["status"], dict)
    assert (first["node"], first["status"]["node"], first["error"]) == ("n1", "n1", None)
    assert third == {
        "node": "n3",
        "pod": "mig-agent-3",
        "status": None,
        "error": "its agent's pod is Pending (ErrImagePull)",
    }
    assert found["available"] == [
        {"profile": "1g.5gb", "memory_mib": 4864, "count": 7},
        {"profile": "1g.10gb", "memory_mib": 9856, "count": 10},
        {"profile": "3g.40gb", "memory_mib": 40448, "count": 1},
    ]


def test_no_text_of_a_node_moves_the_cursor(answers: tuple[NodeAnswer, ...]) -> None:
    hostile = NodeAnswer(answers[2].pod, trouble="gone\x1b[2J\nn9: fine")
    assert "\x1b" not in cluster_page.status_page([hostile], PAGE)
    assert len(cluster_page.status_page([hostile], PAGE).splitlines()) == 3
