"""Leaving a node, and following it: what is done when the API server refuses, hangs or is late; no real one here.

What comes of it on a cluster is in tests/e2e.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.kubeapi import KubeApiError
from mig_agent.core.model import InstanceState
from mig_agent.daemon.uninstall import FAILED, GONE, clean, uninstall
from mig_agent.engine import tasks
from mig_agent.frontends.kubernetes.node import controller
from mig_agent.frontends.kubernetes.node import uninstall as node_uninstall
from mig_agent.frontends.kubernetes.node.controller import NodeFrontend, NodeSettings, first_pauses
from mig_agent.frontends.kubernetes.node.pause_labels import NOT_READ_YET
from mig_agent.frontends.kubernetes.node.uninstall import delete_and_wait, is_leaving, leave
from support.engine import engine
from support.kubeapi import connected, until
from support.webserver import Asked, Says, WebServer, json_of

OWNER = {"kind": "DaemonSet", "name": "mig-agent", "controller": True}
OWN_POD: dict[str, Any] = {
    "metadata": {"namespace": "gpu", "name": "mig-agent-x", "uid": "u-2", "ownerReferences": [OWNER]}
}
STAYS: dict[str, Any] = {"metadata": {"name": "mig-agent", "uid": "u-3"}}


OVERFLOWING = 1100
"""Failures in a row whose power of two no float can hold."""


def placed(*terms: dict[str, Any], **selector: str) -> dict[str, Any]:
    """A DaemonSet that stays, with pods on these nodes."""
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    spec = {"nodeSelector": selector, **({"affinity": {"nodeAffinity": required}} if terms else {})}
    return {**STAYS, "spec": {"template": {"spec": spec}}}


def term(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


GOES: dict[str, Any] = {"metadata": {**STAYS["metadata"], "deletionTimestamp": "2026-11-21T17:00:00Z"}}
NOT_THERE = json_of({"message": "not found"}, 404)
NO = json_of({"message": "mig-agent may not do that: forbidden"}, 403)
LATER = json_of({"message": "later"}, 503)


def node(**labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "n1", "uid": "u-1", "labels": labels, "resourceVersion": "5"}, "status": {}}


def by_path(**answers: object) -> Callable[[Asked], Says]:
    """Answer requests by a text in their path; `Says` as it is, anything else as JSON."""

    def answer(asked: Asked) -> Says:
        for part, said in answers.items():
            if f"/{part}/" in asked.path:
                return said if isinstance(said, Says) else json_of(said)
        return NOT_THERE

    return answer


def followed(
    web: WebServer, patched: Callable[[], Says] = Says, there: dict[str, Any] | None = None
) -> Callable[[Asked], Says]:
    """A node (one that carries the label) that does not change, however it is patched."""

    def endless() -> Iterator[bytes]:
        web.over.wait(60)
        yield b""

    def answer(asked: Asked) -> Says:
        if asked.method == "PATCH":
            return patched()
        if "watch=true" in asked.path:
            return Says(pieces=endless())
        return json_of({"metadata": {"resourceVersion": "5"}, "items": [there or node(mig="true")]})

    return answer


# Whether the agent leaves


@pytest.mark.parametrize(
    ("pods", "daemonsets", "nodes", "leaves"),
    [
        (OWN_POD, STAYS, node(mig="true"), False),
        (OWN_POD, GOES, node(mig="true"), True),
        (OWN_POD, NOT_THERE, node(mig="true"), True),
        (OWN_POD, STAYS, node(), True),
        (OWN_POD, STAYS, node(mig="false"), True),
        (OWN_POD, placed(term("other", "Exists")), node(mig="true"), True),
        (OWN_POD, placed(term("other", "Exists"), term("gpu", "In", "true")), node(mig="true", gpu="true"), False),
        (OWN_POD, placed(term("gpu", "NotIn", "true")), node(mig="true", gpu="true"), True),
        (OWN_POD, placed(term("mig", "DoesNotExist")), node(mig="true"), True),
        (OWN_POD, placed(term("mig", "Gt", "7")), node(mig="true"), False),
        (OWN_POD, placed(pool="a"), node(mig="true", pool="b"), True),
        (
            OWN_POD,
            placed({"matchFields": term("metadata.name", "In", "n1")["matchExpressions"]}),
            node(mig="true"),
            False,
        ),
        (
            OWN_POD,
            placed({"matchFields": term("metadata.name", "In", "n2")["matchExpressions"]}),
            node(mig="true"),
            True,
        ),
        (OWN_POD, placed({}), node(mig="true"), True),
        (NOT_THERE, STAYS, node(mig="true"), False),
        ({"metadata": {"namespace": "gpu", "name": "x", "uid": "y"}}, NOT_THERE, node(), False),
        (NO, GOES, node(), False),
        (OWN_POD, NO, node(), False),
        (OWN_POD, STAYS, NO, False),
    ],
    ids=[
        "restarted",
        "going",
        "gone",
        "label removed",
        "label off",
        "DaemonSet is elsewhere now",
        "DaemonSet is here by another label",
        "DaemonSet keeps away",
        "DaemonSet keeps away from the label",
        "not understood",
        "selector",
        "this node by name",
        "another node by name",
        "no node at all",
        "its pod gone",
        "no DaemonSet's pod",
        "pods denied",
        "DaemonSets denied",
        "nodes denied",
    ],
)
async def test_only_an_agent_that_does_not_come_back_uninstalls(
    web: WebServer, tmp_path: Path, pods: object, daemonsets: object, nodes: object, *, leaves: bool
) -> None:
    web.answer = by_path(pods=pods, daemonsets=daemonsets, nodes=nodes)
    async with connected(web, tmp_path) as api:
        assert await is_leaving(api, "gpu", "mig-agent-x", "mig=true") is leaves


async def test_silent_api_server_means_restart_and_delays_it_briefly(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_uninstall, "ASK_SECONDS", 0.1)

    def hang(_asked: Asked) -> Says:
        web.over.wait(30)
        return Says()

    web.answer = hang
    async with connected(web, tmp_path) as api:
        assert not await is_leaving(api, "gpu", "mig-agent-x", "")


async def test_agent_outside_a_pod_sends_no_query(web: WebServer, tmp_path: Path) -> None:
    async with connected(web, tmp_path) as api:
        assert not await is_leaving(api, "", "", "mig=true")
    assert not web.asked


# Leaving


async def test_uninstall_removes_what_the_agent_wrote_and_leases_stay(web: WebServer, tmp_path: Path) -> None:
    there = node(**{"a/x": "1", "team": "mine"})
    there["metadata"]["annotations"] = {"mig-agent.io/feature-labels": "a/x"}
    there["status"] = {"conditions": [{"type": "MigGpuProblem", "status": "False"}]}
    web.answer = by_path(nodes=there)
    more: list[str] = []

    async def remove_files() -> None:
        more.append("files")

    async with engine(tmp_path, "a100-40gb:1") as running, connected(web, tmp_path) as api:
        kept = await running.acquire("1g.5gb")
        await running.release(await running.acquire("2g.10gb"))
        await leave(api, running.manager, ["nvidia.com/mig-1g.5gb"], [remove_files])
        assert [each.state for each in running.instances()] == [InstanceState.LEASED]
        assert set(running.leases) == {kept.lease.id}
    assert more == ["files"]
    changes = [asked.body for asked in web.asked if asked.method == "PATCH"]
    assert {"status": {"conditions": [{"$patch": "delete", "type": "MigGpuProblem"}]}} in changes
    metadata = {"labels": {"a/x": None}, "annotations": {"mig-agent.io/feature-labels": None}}
    assert {"metadata": metadata} in changes
    assert {"op": "add", "path": "/status/capacity/nvidia.com~1mig-1g.5gb", "value": "0"} in changes[-1]


async def test_a_step_that_fails_does_not_hold_up_the_others(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_uninstall, "STEP_SECONDS", 5.0)
    web.answer = lambda _asked: NO
    done: list[str] = []

    async def broken() -> None:
        raise OSError("the disk is full")

    async def last() -> None:
        done.append("last")

    async with engine(tmp_path, "a100-40gb:1") as running, connected(web, tmp_path) as api:
        await running.release(await running.acquire("2g.10gb"))
        await leave(api, running.manager, ["a/b"], [broken, last])
        assert not running.instances()
    assert done == ["last"]


# Deleting the DaemonSet


async def test_a_daemon_set_is_deleted_once_and_waited_for(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_uninstall, "POLL_SECONDS", 0.01)
    looks = iter([json_of(STAYS), json_of(GOES), LATER, LATER, LATER, json_of(GOES), NOT_THERE])
    web.answer = lambda asked: Says() if asked.method == "DELETE" else next(looks)
    async with connected(web, tmp_path) as api:
        assert await delete_and_wait(api, "gpu", "mig-agent", 60.0)
    assert [asked.method for asked in web.asked].count("DELETE") == 1


async def test_wait_for_a_stuck_daemon_set_is_bounded(web: WebServer, tmp_path: Path) -> None:
    web.answer = by_path(daemonsets=GOES)
    async with connected(web, tmp_path) as api:
        assert not await delete_and_wait(api, "gpu", "mig-agent", 0.0)


async def test_refused_deletion_of_a_daemon_set_raises(web: WebServer, tmp_path: Path) -> None:
    web.answer = lambda asked: NO if asked.method == "DELETE" else json_of(STAYS)
    async with connected(web, tmp_path) as api:
        with pytest.raises(KubeApiError, match="forbidden"):
            await delete_and_wait(api, "gpu", "mig-agent", 60.0)


@pytest.mark.parametrize(
    ("says", "seconds", "code", "words"),
    [
        (NOT_THERE, 60.0, GONE, "have gone"),
        (json_of(GOES), 0.0, FAILED, "some have not gone in 0 s"),
        (NO, 60.0, FAILED, "forbidden"),
    ],
    ids=["gone", "late", "denied"],
)
def test_uninstall_command_reports_the_result(
    web: WebServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    says: Says,
    seconds: float,
    code: int,
    words: str,
) -> None:
    web.answer = lambda _asked: says
    assert uninstall("gpu", "mig-agent", seconds, web.kubeconfig(tmp_path)) == code
    assert words in capsys.readouterr().err


def test_clean_command_works_without_the_agent(
    web: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = node(**{"a/x": "1", "team": "mine"})
    there["metadata"]["annotations"] = {"mig-agent.io/feature-labels": "a/x", "mig-agent.io/node-resources": "c/d"}
    numbers = {"c/d": "7", "cpu": "2"}
    conditions = [{"type": "MigGpuProblem", "status": "False"}]
    there["status"] = {"conditions": conditions, "capacity": numbers, "allocatable": numbers}
    after = node(team="mine")

    def answer(asked: Asked) -> Says:
        cleaned = any("capacity" in (each.body or {}).get("status", {}) for each in web.asked)
        return json_of(after if cleaned and asked.method == "GET" else there)

    web.answer = answer
    assert clean("n1", web.kubeconfig(tmp_path)) == GONE
    assert "nothing of an agent is on node n1" in capsys.readouterr().err
    changes = [asked.body for asked in web.asked if asked.method == "PATCH"]
    gone: dict[str, None] = {"c/d": None}
    annotations: dict[str, None] = {"mig-agent.io/node-resources": None}
    assert {"metadata": {"annotations": annotations}, "status": {"capacity": gone, "allocatable": gone}} in changes
    assert len(changes) == 3
    web.answer = lambda _asked: NO
    assert clean("n1", web.kubeconfig(tmp_path)) == FAILED


# Starting and following


async def test_nodes_label_is_checked_before_the_driver_is_opened(web: WebServer, tmp_path: Path) -> None:
    async with connected(web, tmp_path) as api:
        web.answer = by_path(nodes=node(mig="true"))
        assert await first_pauses(api, NodeSettings(label="mig=true")) == ()
        web.answer = by_path(nodes=node())
        (reason,) = await first_pauses(api, NodeSettings(label="mig=true"))
        assert "mig=true" in reason


async def test_driver_stays_closed_if_a_label_is_configured_and_the_api_server_is_silent(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "FIRST_READ_SECONDS", 0.1)

    def hang(_asked: Asked) -> Says:
        web.over.wait(30)
        return Says()

    web.answer = hang
    async with connected(web, tmp_path) as api:
        assert await first_pauses(api, NodeSettings(label="mig")) == (NOT_READ_YET,)
        assert await first_pauses(api, NodeSettings()) == ()


async def test_agent_resumes_when_the_node_is_read_and_retries_its_first_write(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_SECONDS", (0.01, 0.01))
    failures = iter([LATER, NO])
    web.answer = followed(web, lambda: next(failures, Says()))
    settings = NodeSettings(label="mig=true")
    async with (
        engine(tmp_path, "a100-40gb:1", paused=(NOT_READ_YET,)) as running,
        connected(web, tmp_path) as api,
    ):
        shows = NodeFrontend(running.manager, api, settings, (NOT_READ_YET,))
        shows.start()
        try:
            await until(lambda: not running.manager.snapshot.paused)
            await until(lambda: any(each.path.endswith("/n1") for each in web.asked))
        finally:
            await shows.close()
        assert not running.manager.on_view
    labels = next(asked.body["metadata"]["labels"] for asked in web.asked if asked.path.endswith("/n1"))
    assert labels["nvidia.com/mig-1g.5gb.count"] == "7"


async def test_nodes_labels_are_followed_after_any_error(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_SECONDS", (0.01, 0.01))
    web.answer = followed(web)
    async with (
        engine(tmp_path, "a100-40gb:1", paused=(NOT_READ_YET,)) as running,
        connected(web, tmp_path) as api,
    ):
        resume, failures = running.manager.resume, iter([OSError("no more threads")])

        async def failing(*arguments: Any, **options: Any) -> Any:
            for error in failures:
                raise error
            return await resume(*arguments, **options)

        monkeypatch.setattr(running.manager, "resume", failing)
        shows = NodeFrontend(running.manager, api, NodeSettings(label="mig=true"), (NOT_READ_YET,))
        shows.start()
        try:
            await until(lambda: not running.manager.snapshot.paused)
        finally:
            await shows.close()


async def test_node_object_is_updated_after_any_error(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_SECONDS", (0.01, 0.01))
    web.answer = followed(web)
    write, failures = controller.write, iter([OSError("no more threads"), KeyError("status"), KubeApiError("later")])

    async def failing(*arguments: Any) -> None:
        for error in failures:
            raise error
        await write(*arguments)

    monkeypatch.setattr(controller, "write", failing)
    async with engine(tmp_path, "a100-40gb:1") as running, connected(web, tmp_path) as api:
        shows = NodeFrontend(running.manager, api, NodeSettings(label="mig=true"))
        shows.start()
        try:
            await until(lambda: any(asked.method == "PATCH" for asked in web.asked))
        finally:
            await shows.close()


async def test_node_object_is_updated_after_half_a_day_of_refusals(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(tasks, "AGAIN_SECONDS", 1e9)  # a loop that has to begin anew has failed
    web.answer = followed(web)
    write, failures = controller.write, iter(range(OVERFLOWING))

    async def refused(*arguments: Any) -> None:
        await asyncio.sleep(0)
        if next(failures, None) is not None:
            raise KubeApiError("later")
        await write(*arguments)

    monkeypatch.setattr(controller, "write", refused)
    async with engine(tmp_path, "a100-40gb:1") as running, connected(web, tmp_path) as api:
        shows = NodeFrontend(running.manager, api, NodeSettings(label="mig=true"))
        shows.start()
        try:
            await until(lambda: any(asked.method == "PATCH" for asked in web.asked))
        finally:
            await shows.close()


async def test_node_without_gpus_loses_what_an_earlier_agent_wrote(web: WebServer, tmp_path: Path) -> None:
    shown = node(**{"nvidia.com/mig.capable": "true", "mine": "x"})
    shown["metadata"]["annotations"] = {"mig-agent.io/feature-labels": "nvidia.com/mig.capable"}
    web.answer = followed(web, there=shown)
    async with engine(tmp_path, "a100-40gb:1") as running, connected(web, tmp_path) as api:
        shows = NodeFrontend(running.manager, api, NodeSettings(has_gpus=False))
        shows.start()
        try:
            await until(lambda: any(asked.method == "PATCH" for asked in web.asked))
        finally:
            await shows.close()
    patch = next(asked.body for asked in web.asked if asked.method == "PATCH")
    assert patch["metadata"]["labels"] == {"nvidia.com/mig.capable": None}
