"""Registrations come back by themselves, at once, and give way to other plugins."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mig_agent.adapters.kubelet import KubeletError, KubeletPaths
from mig_agent.core.owner import KubeletDevice
from mig_agent.core.requests import profile_want
from mig_agent.frontends.kubernetes.device_plugin import registration as module
from mig_agent.frontends.kubernetes.device_plugin.registration import Offer, Registration
from mig_agent.frontends.kubernetes.device_plugin.service import ResourceService
from mig_agent.frontends.kubernetes.resources import Resource
from support.registered import Decided

NAMES = ("nvidia.com/mig-1g.10gb", "nvidia.com/mig-7g.80gb")


@dataclass
class Kubelet:
    """A kubelet that answers as it is told, and records what it was asked."""

    paths: KubeletPaths
    others: tuple[KubeletDevice, ...] = ()
    asked: list[str] = field(default_factory=list)
    silent: bool = False

    async def allocatable(self) -> tuple[KubeletDevice, ...]:
        self.asked.append("allocatable")
        if self.silent:
            raise KubeletError("cannot tell who serves resources on this node: it does not say")
        return self.others

    async def register(self, _paths: KubeletPaths, *, resource: str, socket_name: str, pre_start: bool) -> None:
        assert pre_start
        assert (self.paths.plugins / socket_name).is_socket(), "it listens before it registers"
        self.asked.append(resource)

    def starts(self) -> None:
        """Restart as a kubelet does: it empties the folder and makes its socket anew."""
        for path in self.paths.plugins.iterdir():
            path.unlink()
        self.paths.registration.touch()
        self.asked.clear()


@dataclass
class Story:
    kubelet: Kubelet
    registering: Registration
    lost: list[ResourceService]
    taken: list[str]

    def offer(self, name: str = NAMES[0]) -> Offer:
        return self.registering.offers[name]

    async def look(self) -> list[str]:
        """Poll once; return what the kubelet was asked."""
        self.kubelet.asked.clear()
        await self.registering.check()
        return list(self.kubelet.asked)

    def later(self) -> None:
        """Whatever had to wait is due now."""
        self.registering._checked = -1000.0
        for offer in self.registering.offers.values():
            offer.retry_at = 0.0


@pytest.fixture
async def story(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Story]:
    with tempfile.TemporaryDirectory() as name:
        paths = KubeletPaths(Path(name))
        paths.plugins.mkdir()
        kubelet = Kubelet(paths)
        monkeypatch.setattr(module, "register", kubelet.register)
        lost, taken = list[ResourceService](), list[str]()
        found = Registration(paths=paths, kubelet=kubelet, on_lost=lost.append, on_taken=taken.append)
        for each in NAMES:
            resource = Resource(name=each, label=each.rpartition("-")[2], want=profile_want("1g.10gb"))
            found.add(ResourceService(resource, Decided(), 25.0))
        yield Story(kubelet, found, lost, taken)
        await found.close(0.0)


async def test_registration_checks_for_another_plugin_first(story: Story) -> None:
    assert await story.look() == [], "there is no kubelet yet"
    story.kubelet.starts()
    assert await story.look() == ["allocatable", *NAMES]
    assert await story.look() == [], "once is enough"


async def test_restarted_kubelet_gets_the_registrations_at_once(story: Story) -> None:
    """Pods whose devices it does not know when it admits them again fail for good."""
    story.kubelet.starts()
    await story.look()
    before = story.offer().socket
    story.kubelet.starts()
    story.kubelet.silent = True  # its other socket comes later
    assert sorted((await story.look())[:2]) == sorted(NAMES)
    assert len(story.lost) == 2
    assert story.offer().socket is not before
    assert story.offer().registrations == 2


async def test_kubelet_that_has_just_ended_is_polled_more_often(story: Story) -> None:
    """The kubelet admits pods that wait again as soon as it is back."""
    clock = asyncio.get_running_loop().time() + 1000.0
    assert story.registering.pause(clock) == module.POLL_SECONDS, "there has been none"
    story.kubelet.starts()
    await story.look()
    now = story.offer().listened_at
    story.offer().service.streams = 1
    assert story.registering.pause(now) == module.POLL_SECONDS
    story.offer().service.streams = 0
    assert story.registering.pause(now + 1.0) == module.FAST_POLL_SECONDS
    assert story.registering.pause(now + module.FAST_POLL_FOR_SECONDS + 1.0) == module.POLL_SECONDS, "not for ever"


async def test_removed_socket_is_created_again(story: Story) -> None:
    story.kubelet.starts()
    await story.look()
    for path in story.kubelet.paths.plugins.glob("mig-agent_1g*"):
        path.unlink()
    assert await story.look() == [NAMES[0]]


async def test_plugin_that_registers_later_keeps_the_resource_until_it_ends(story: Story) -> None:
    story.kubelet.starts()
    await story.look()
    socket = story.offer().socket
    story.kubelet.others = (KubeletDevice(resource=NAMES[0], id="GPU-1"),)
    story.later()
    assert await story.look() == ["allocatable"]
    assert story.offer().taken
    assert not story.offer(NAMES[1]).taken
    assert story.offer().socket is socket, "its end would make the kubelet distrust the other's devices"
    story.later()
    assert NAMES[0] not in await story.look()
    assert len(story.taken) == 1
    story.kubelet.others = ()
    story.later()
    assert await story.look() == ["allocatable", NAMES[0]]
    assert story.offer().socket is not socket


async def test_registration_retries_if_the_kubelet_does_not_list_plugins(story: Story) -> None:
    story.kubelet.starts()
    story.kubelet.silent = True
    assert await story.look() == ["allocatable"]
    assert "it does not say" in story.offer().message
    story.kubelet.silent = False
    story.later()
    assert await story.look() == ["allocatable", *NAMES]
    assert story.offer().message == ""


async def test_registration_is_retried_until_the_kubelet_accepts_it(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.kubelet.starts()
    await story.look()
    monkeypatch.setattr(module, "LISTEN_SECONDS", -1.0)
    story.later()
    assert await story.look() == ["allocatable", *NAMES]
    story.offer().service.streams = 1
    story.offer(NAMES[1]).service.streams = 1
    monkeypatch.undo()
    story.later()
    assert await story.look() == ["allocatable"]
