"""Following the node and its pods: lists, watches that end or are refused, and what is told meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mig_agent.adapters.kubeapi import NodeFacts, PodFacts, PodName
from support.kubeapi import connected, until
from support.webserver import Asked, Says, WebServer, json_of


def line(kind: str, version: str, **labels: str) -> bytes:
    node = {"metadata": {"name": "n1", "uid": "u-1", "resourceVersion": version, "labels": labels}}
    return json_of({"type": kind, "object": node}).body + b"\n"


async def heard(seen: list[NodeFacts], versions: list[str]) -> None:
    await until(lambda: [facts.resource_version for facts in seen] == versions)


async def test_a_watch_goes_on_where_it_ended_and_lists_again_what_is_too_old(web: WebServer, tmp_path: Path) -> None:
    gone = json_of({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}).body + b"\n"

    def endless() -> Iterator[bytes]:
        web.over.wait(30)
        yield b""

    def answer(asked: Asked) -> Says:
        if "watch=true" not in asked.path:
            listed = sum("watch=true" not in each.path for each in web.asked)
            node = {"metadata": {"name": "n1", "uid": "u-1", "resourceVersion": f"{listed}0"}}
            return json_of({"metadata": {"resourceVersion": f"{listed}0"}, "items": [node]})
        if "resourceVersion=10&" in asked.path:
            # In pieces that end anywhere, and an end in the middle of a line.
            whole = line("MODIFIED", "11") + line("BOOKMARK", "12") + b'{"type": "MODI'
            return Says(pieces=iter([whole[:30], whole[30:]]))
        if "resourceVersion=12&" in asked.path:
            return Says(pieces=iter([line("MODIFIED", "13"), gone]))
        return Says(pieces=endless())

    web.answer = answer
    seen: list[NodeFacts] = []
    lost: list[str] = []
    async with connected(web, tmp_path) as api:
        api.follow_node(seen.append, lost.append)
        late: list[NodeFacts] = []
        await heard(seen, ["10", "11", "13", "20"])
        second = api.follow_node(late.append)
        await heard(late, ["20"])
        second.close()
    assert not lost, "nothing of this is a loss of touch"
    assert all("fieldSelector=metadata.name%3Dn1" in asked.path for asked in web.asked)


async def test_lost_touch_is_told_and_so_is_its_return(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mig_agent.adapters.kubeapi.informer.FIRST_PAUSE_SECONDS", 0.01)
    down = True

    def endless() -> Iterator[bytes]:
        web.over.wait(30)
        yield b""

    def answer(asked: Asked) -> Says:
        if down:
            return json_of({"message": "not now"}, 503)
        return Says(pieces=endless()) if "watch=true" in asked.path else json_of(_list("5"))

    web.answer = answer
    seen: list[NodeFacts] = []
    lost: list[str] = []
    async with connected(web, tmp_path) as api:
        api.follow_node(seen.append, lost.append)
        await until(lambda: bool(lost))
        assert "not now" in lost[0]
        down = False
        await heard(seen, ["5"])


async def test_pods_of_the_node_are_followed_from_what_the_server_has_in_memory(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mig_agent.adapters.kubeapi.informer.FIRST_PAUSE_SECONDS", 0.01)
    allowed = False
    metadata = {"namespace": "team-a", "name": "train", "uid": "u-2", "resourceVersion": "9"}
    bound = {"metadata": metadata, "spec": {"nodeName": "n1"}}

    def endless() -> Iterator[bytes]:
        yield json_of({"type": "ADDED", "object": bound}).body + b"\n"
        web.over.wait(30)

    def answer(asked: Asked) -> Says:
        if not allowed:
            return json_of({"message": "pods is forbidden"}, 403)
        if "watch=true" in asked.path:
            return Says(pieces=endless())
        return json_of({"metadata": {"resourceVersion": "5"}, "items": []})

    web.answer = answer
    seen: list[Mapping[PodName, PodFacts]] = []
    lost: list[str] = []
    async with connected(web, tmp_path) as api:
        following = api.follow_pods(seen.append, lost.append)
        await until(lambda: bool(lost))
        assert "pods is forbidden" in lost[0]
        allowed = True
        await until(lambda: len(seen) == 2)
        assert [list(each) for each in seen] == [[], [("team-a", "train")]]
        following.close()
        watch = api._pods_informer.watch
        assert watch is None, "nobody follows any more"
    assert all("fieldSelector=spec.nodeName%3Dn1" in asked.path for asked in web.asked)
    assert {"resourceVersion=0" in asked.path for asked in web.asked if "watch=true" not in asked.path} == {True}
    (watched,) = [asked.path for asked in web.asked if "watch=true" in asked.path]
    assert "resourceVersion=5&" in watched


async def test_a_closed_watch_ends_its_thread_although_the_server_says_nothing(web: WebServer, tmp_path: Path) -> None:
    def endless() -> Iterator[bytes]:
        web.over.wait(60)
        yield b""

    web.answer = lambda asked: Says(pieces=endless()) if "watch=true" in asked.path else json_of(_list("5"))
    seen: list[NodeFacts] = []
    async with connected(web, tmp_path) as api:
        following = api.follow_node(seen.append)
        await heard(seen, ["5"])
        watch = api._node_informer.watch
        assert watch is not None
        await until(lambda: any("watch=true" in asked.path for asked in web.asked))
        following.close()
        following.close()
        assert await asyncio.to_thread(watch.join, 30.0)


async def test_one_that_is_closed_while_the_server_is_asked_ends_as_well(web: WebServer, tmp_path: Path) -> None:
    asked_for, closed = threading.Event(), threading.Event()

    def silent() -> Iterator[bytes]:
        web.over.wait(60)
        yield b""

    def answer(asked: Asked) -> Says:
        if "watch=true" not in asked.path:
            return json_of(_list("5"))
        asked_for.set()
        closed.wait(30)
        return Says(pieces=silent())

    web.answer = answer
    async with connected(web, tmp_path) as api:
        following = api.follow_node(lambda _: None)
        assert await asyncio.to_thread(asked_for.wait, 30)
        watch = api._node_informer.watch
        assert watch is not None
        following.close()
        closed.set()
        assert await asyncio.to_thread(watch.join, 30.0)


async def test_a_server_that_ends_every_watch_at_once_is_not_asked_without_pause(
    web: WebServer, tmp_path: Path
) -> None:
    web.answer = lambda asked: Says(pieces=iter(())) if "watch=true" in asked.path else json_of(_list("5"))
    seen: list[NodeFacts] = []
    async with connected(web, tmp_path) as api:
        api.follow_node(seen.append)
        await heard(seen, ["5"])
        await asyncio.sleep(0.5)
    assert len(web.asked) < 20


def _list(version: str) -> object:
    node = {"metadata": {"name": "n1", "uid": "u-1", "resourceVersion": version}}
    return {"metadata": {"resourceVersion": version}, "items": [node]}
