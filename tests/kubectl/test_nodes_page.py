"""Pages of several nodes, from their answers."""

from __future__ import annotations

from dataclasses import replace

from mig_agent.client.types import Status
from mig_agent.migctl import nodes_page
from mig_agent.migctl.answers import Answer, troubles
from mig_agent.migctl.status_page import Page

PAGE = Page(unicode=False)


def test_the_map_has_every_node_and_what_fits_on_all_together(answers: tuple[Answer[Status], ...]) -> None:
    lines = nodes_page.status_page(answers, PAGE, "node").splitlines()
    assert lines[0] == "3 nodes, 2 GPUs, 2 leases, 1 waiting, no answer from 1 node"
    assert "n1: 1 GPU, 1 lease, 1 waiting (revision 7)" in lines
    assert "n3: its agent's pod is Pending (ErrImagePull)" in lines
    gpus = [line for line in lines if line.startswith("GPU 0")]
    assert "alice" in gpus[0]
    assert gpus[0].index("|") == gpus[1].index("|"), "the maps of all nodes begin in one column"
    assert lines[-1] == "fits now (up to 39.5 GiB), any one of: 7 x 1g.5gb, 10 x 1g.10gb, 1 x 3g.40gb"
    assert sum("leased" in line for line in lines) == 1, "one legend for all"
    assert max(map(len, lines)) <= 80


def test_wide_has_leases_and_the_queue_too(answers: tuple[Answer[Status], ...]) -> None:
    page = nodes_page.status_page(answers, Page(unicode=False, leases=True), "node")
    assert "l2     carol" in page
    assert "bob" in page


def test_leases_of_all_nodes_are_one_table(answers: tuple[Answer[Status], ...]) -> None:
    header, first, second = nodes_page.leases_page(answers, PAGE, "node").splitlines()
    assert header.split() == ["NODE", "LEASE", "HOLDER", "GPU", "SLICES", "PROFILE", "AGE", "ENDS", "IN", "NOTE"]
    assert first.split()[:6] == ["n1", "l1", "alice", "0", "0", "1g.10gb"]
    assert second.split()[:3] == ["n2", "l2", "carol"]
    assert second.endswith("unused"), "a column that one node needs is there for all"
    assert troubles(answers) == ["n3: its agent's pod is Pending (ErrImagePull)"]


def test_the_queue_of_all_nodes(answers: tuple[Answer[Status], ...]) -> None:
    _, waits = nodes_page.queue_page(answers, PAGE, "node").splitlines()
    assert waits.split()[:5] == ["n1", "1", "r", "bob", "7g.80gb"]
    assert nodes_page.queue_page(answers[1:2], PAGE, "node") == "no request waits"
    assert nodes_page.queue_page(answers[1:], PAGE, "node") == "no request waits on nodes that answer"


def test_columns_that_different_nodes_need_are_all_there(answers: tuple[Answer[Status], ...]) -> None:
    first, second, _ = answers
    assert first.found is not None
    assert second.found is not None
    (waiting,) = first.found.queue
    other = replace(second.found, queue=(replace(waiting, request_id="", priority=7),))
    header, one, two = nodes_page.queue_page((first, replace(second, found=other)), PAGE, "node").splitlines()
    assert header.split()[:6] == ["NODE", "PLACE", "REQUEST", "HOLDER", "WANTS", "PRIORITY"]
    assert one.split()[:5] == ["n1", "1", "r", "bob", "7g.80gb"]
    assert two.split()[:5] == ["n2", "1", "bob", "7g.80gb", "7"]


def test_json_has_each_nodes_status_or_why_there_is_none(answers: tuple[Answer[Status], ...]) -> None:
    found = nodes_page.encode(answers, "node")
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


def test_no_text_of_a_node_moves_the_cursor(answers: tuple[Answer[Status], ...]) -> None:
    hostile: Answer[Status] = Answer(answers[2].target, trouble="gone\x1b[2J\nn9: fine")
    assert "\x1b" not in nodes_page.status_page([hostile], PAGE, "node")
    assert len(nodes_page.status_page([hostile], PAGE, "node").splitlines()) == 3
