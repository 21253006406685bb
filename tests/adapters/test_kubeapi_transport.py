"""The way to the API server: what is sent, and what comes of servers that refuse, hang, trickle or talk nonsense."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.kubeapi import KubeApiError, KubeClient, NodeCondition, transport
from mig_agent.adapters.kubeapi import client as api_module
from mig_agent.adapters.threads import Call
from mig_agent.core.errors import ConfigError
from mig_agent.core.owner import Pod
from support.kubeapi import connected, until
from support.webserver import Asked, Says, WebServer, json_of, web_server

NODE = {
    "metadata": {"name": "n1", "uid": "u-1", "resourceVersion": "7", "labels": {"a": "b"}},
    "status": {"capacity": {"cpu": "2"}, "allocatable": {"cpu": "2"}},
}
POD: dict[str, Any] = {"metadata": {"namespace": "team-a", "name": "train", "uid": "u-2"}, "spec": {"priority": 5}}


async def test_an_object_is_read_with_the_token(web: WebServer, tmp_path: Path) -> None:
    web.answer = lambda _asked: json_of(NODE)
    async with connected(web, tmp_path) as api:
        facts = await api.node()
    assert (facts.name, facts.uid, facts.labels) == ("n1", "u-1", {"a": "b"})
    (asked,) = web.asked
    assert (asked.method, asked.path) == ("GET", "/api/v1/nodes/n1")
    assert asked.headers["authorization"] == "Bearer a-token"


async def test_a_pod_that_is_not_there_is_none(web: WebServer, tmp_path: Path) -> None:
    web.answer = lambda _asked: json_of({"message": "pods not found"}, 404)
    async with connected(web, tmp_path) as api:
        assert await api.pod("team-a", "train") is None
        with pytest.raises(KubeApiError, match="cannot find node n1"):
            await api.node()
    assert len(web.asked) == 2, "what is not there is not asked for again"


async def test_what_may_succeed_a_moment_later_is_tried_again(web: WebServer, tmp_path: Path) -> None:
    answers = iter([json_of({"message": "etcd has no leader"}, 500), Says(200, b"nonsense"), json_of(POD)])
    web.answer = lambda _asked: next(answers)
    async with connected(web, tmp_path) as api:
        pod = await api.pod("team-a", "train")
    assert pod is not None
    assert (pod.uid, pod.priority) == ("u-2", 5)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_is_told_in_the_servers_words(web: WebServer, tmp_path: Path, status: int) -> None:
    web.answer = lambda _asked: json_of({"message": "nodes is forbidden"}, status)
    async with connected(web, tmp_path) as api:
        with pytest.raises(KubeApiError, match="cannot read /api/v1/nodes/n1: nodes is forbidden") as caught:
            await api.node()
    assert caught.value.status == status
    assert len(web.asked) == 1


@pytest.mark.parametrize("body", [b"[]", b"7", b'{"metadata": 7}', b"{}"])
async def test_an_answer_that_is_no_node_is_an_error_in_words(web: WebServer, tmp_path: Path, body: bytes) -> None:
    web.answer = lambda _asked: Says(200, body)
    async with connected(web, tmp_path) as api:
        with pytest.raises(KubeApiError, match="cannot read /api/v1/nodes/n1"):
            await api.node()


async def test_a_server_that_is_not_there_is_told_with_its_address(tmp_path: Path) -> None:
    with web_server() as gone:
        path = gone.kubeconfig(tmp_path)
    api = KubeClient.connect(path, "n1")
    with pytest.raises(KubeApiError, match=f"at {gone.address}") as caught:
        await api.patch_resources({"example.com/a": 1})
    assert caught.value.retryable
    api.close()


async def test_a_server_that_hangs_holds_up_neither_the_loop_nor_other_calls(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of the loop's side is the shorter one here, so that the thread is still in its call."""
    monkeypatch.setattr(api_module, "DEADLINE_SECONDS", 0.3)

    def answer(asked: Asked) -> Says:
        if "pods" in asked.path:
            web.over.wait(30)
        return json_of(NODE)

    web.answer = answer
    async with connected(web, tmp_path) as api:
        with pytest.raises(KubeApiError, match=r"no answer for 0\.3 s"):
            await api.pod("team-a", "train")
        monkeypatch.setattr(api_module, "DEADLINE_SECONDS", 30.0)
        assert (await api.node()).name == "n1"
        await api.patch_resources({"example.com/a": 1})


async def test_a_cancellation_that_comes_together_with_the_answer_is_not_lost(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loop that is cancelled goes on, and whoever waits for its end waits for ever."""
    calls: list[Call[Any]] = []

    def made(*arguments: Any) -> Call[Any]:
        calls.append(Call(*arguments))
        return calls[-1]

    monkeypatch.setattr(api_module, "Call", made)
    web.answer = lambda _asked: Says(200 if web.over.wait(30) else 504)
    async with connected(web, tmp_path) as api:
        task = asyncio.get_running_loop().create_task(api.node())
        await until(lambda: bool(calls))
        calls[0].answer.set_result(NODE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_server_that_trickles_does_not_stretch_a_call(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "CALL_SECONDS", 0.2)

    def trickle() -> Iterator[bytes]:
        while not web.over.wait(0.02):
            yield b" "

    web.answer = lambda _asked: Says(pieces=trickle())
    async with connected(web, tmp_path) as api:
        with pytest.raises(KubeApiError, match="does not come to an end"):
            await api.patch_resources({"example.com/a": 1})


async def test_an_answer_without_end_is_not_kept(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_MOST_BYTES", 1 << 20)
    web.answer = lambda _asked: Says(pieces=itertools.repeat(b"x" * 65536, 64))
    async with connected(web, tmp_path) as api:
        with pytest.raises(KubeApiError, match="does not come to an end"):
            await api.patch_resources({"example.com/a": 1})


async def test_changes_are_sent_in_order_and_once(web: WebServer, tmp_path: Path) -> None:
    async with connected(web, tmp_path) as api:
        await asyncio.gather(*(api.patch_resources({"nvidia.com/mig-1g.10gb": count}) for count in range(20)))
    assert [asked.body[0]["value"] for asked in web.asked] == [str(count) for count in range(20)]
    assert {asked.path for asked in web.asked} == {"/api/v1/nodes/n1/status"}
    assert web.asked[0].body == [
        {"op": "add", "path": "/status/capacity/nvidia.com~1mig-1g.10gb", "value": "0"},
        {"op": "add", "path": "/status/allocatable/nvidia.com~1mig-1g.10gb", "value": "0"},
    ]
    assert web.asked[0].headers["content-type"] == "application/json-patch+json"


async def test_a_change_that_failed_is_not_repeated_by_itself(web: WebServer, tmp_path: Path) -> None:
    """Who asked for it knows by now what is wanted; it may be something else."""
    web.answer = lambda _asked: json_of({"message": "try later"}, 503)
    async with connected(web, tmp_path) as api:
        with pytest.raises(KubeApiError, match="cannot change /api/v1/nodes/n1/status: try later"):
            await api.patch_resources({"example.com/a": 1})
    assert len(web.asked) == 1


async def test_labels_and_annotations_are_one_change_that_touches_nothing_else(web: WebServer, tmp_path: Path) -> None:
    async with connected(web, tmp_path) as api:
        await api.patch_labels({"a/b": "1", "c": None}, {"mig-agent.io/x": "a/b"})
    (asked,) = web.asked
    assert (asked.method, asked.path) == ("PATCH", "/api/v1/nodes/n1")
    assert asked.headers["content-type"] == "application/merge-patch+json"
    metadata = {"labels": {"a/b": "1", "c": None}, "annotations": {"mig-agent.io/x": "a/b"}}
    assert asked.body == {"metadata": metadata}


async def test_the_transition_of_a_condition_is_kept_while_its_status_is(web: WebServer, tmp_path: Path) -> None:
    good = NodeCondition(type="T", status="False", reason="Good", message="all is well")
    bad = NodeCondition(type="T", status="True", reason="Bad", message="one is lost")
    worse = NodeCondition(type="T", status="True", reason="Worse", message="two are lost")
    async with connected(web, tmp_path) as api:
        for condition, before in ((good, None), (bad, good), (worse, bad)):
            await api.patch_condition(condition, before)
        await api.remove_condition("T")
    entries = [asked.body["status"]["conditions"][0] for asked in web.asked]
    assert ["lastTransitionTime" in entry for entry in entries] == [True, True, False, False]
    assert entries[2]["message"] == "two are lost"
    assert entries[3] == {"$patch": "delete", "type": "T"}


async def test_an_event_is_told_of_a_pod_and_the_same_again_counts_it_up(web: WebServer, tmp_path: Path) -> None:
    pod = Pod(namespace="team-a", name="train", uid="u-2")
    async with connected(web, tmp_path) as api:
        for _ in range(3):
            await api.tell(pod, "NoCapacity", "cannot place 7g.80gb", warning=True)
    first, *again = web.asked
    assert (first.method, first.path) == ("POST", "/api/v1/namespaces/team-a/events")
    assert first.body["involvedObject"]["uid"] == "u-2"
    assert (first.body["reason"], first.body["type"]) == ("NoCapacity", "Warning")
    name = first.body["metadata"]["name"]
    assert {asked.path for asked in again} == {f"/api/v1/namespaces/team-a/events/{name}"}
    assert [asked.body["count"] for asked in again] == [2, 3]


async def test_an_event_that_the_server_has_forgotten_is_told_anew(web: WebServer, tmp_path: Path) -> None:
    web.answer = lambda asked: json_of({"message": "gone"}, 404) if asked.method == "PATCH" else Says()
    pod = Pod(namespace="team-a", name="train", uid="u-2")
    async with connected(web, tmp_path) as api:
        for _ in range(2):
            await api.tell(pod, "NoCapacity", "cannot place 7g.80gb", warning=True)
    assert [asked.method for asked in web.asked] == ["POST", "PATCH", "POST"]


async def test_the_uid_of_a_pod_is_looked_up_where_nobody_knows_it(web: WebServer, tmp_path: Path) -> None:
    web.answer = lambda asked: json_of(POD) if asked.method == "GET" else Says()
    async with connected(web, tmp_path) as api:
        await api.tell(Pod(namespace="team-a", name="train"), "Waits", "words", warning=False)
    assert web.asked[-1].body["involvedObject"]["uid"] == "u-2"


@pytest.mark.parametrize("name", ["x" * 253, "a" * 199 + "-" + "b" * 40, "a" * 199 + "." + "b" * 40])
async def test_an_event_of_a_pod_with_a_long_name_has_a_name_that_is_one(
    web: WebServer, tmp_path: Path, name: str
) -> None:
    async with connected(web, tmp_path) as api:
        await api.tell(Pod(namespace="team-a", name=name, uid="u-2"), "Waits", "words", warning=False)
    own = web.asked[0].body["metadata"]["name"]
    assert len(own) <= 253
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", own)


async def test_an_event_that_cannot_be_told_is_no_error(web: WebServer, tmp_path: Path) -> None:
    web.answer = lambda _asked: json_of({"message": "no"}, 403)
    async with connected(web, tmp_path) as api:
        await api.tell(None, "Reason", "words", warning=False)


async def test_a_daemon_set_is_deleted_in_the_foreground(web: WebServer, tmp_path: Path) -> None:
    async with connected(web, tmp_path) as api:
        await api.delete_daemon_set("gpu", "mig-agent")
    (asked,) = web.asked
    assert (asked.method, asked.path) == ("DELETE", "/apis/apps/v1/namespaces/gpu/daemonsets/mig-agent")
    assert asked.body["propagationPolicy"] == "Foreground"


@pytest.mark.parametrize("text", ["", "no yaml: [", "apiVersion: v1\nkind: Config\n"])
def test_a_kubeconfig_that_cannot_be_used_is_told_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"cannot reach the API server with {path}"):
        KubeClient.connect(path, "n1")


def test_outside_of_a_pod_a_kubeconfig_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="cannot reach the API server as a pod of it") as caught:
        KubeClient.connect(None, "n1")
    assert "--kubeconfig" in caught.value.hint


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match="cannot reach the API server") as caught:
        KubeClient.connect(tmp_path / "kubeconfig.yaml", "n1")
    assert "mig-agent[kubernetes]" in caught.value.hint


def test_importing_the_agent_does_not_import_the_library() -> None:
    """It costs every other agent memory and time."""
    parts = "daemon.serve, mig_agent.adapters.kubeapi, mig_agent.frontends.kubernetes.node.uninstall"
    program = f"import sys, mig_agent.{parts}; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
