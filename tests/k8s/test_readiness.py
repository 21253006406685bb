"""Readiness of the agent's pod: the kubelet knows all that it is offered, and has not lost it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mig_agent.adapters.kubelet import KubeletError, KubeletPaths
from mig_agent.core.owner import KubeletDevice
from mig_agent.core.requests import profile_want
from mig_agent.frontends.kubernetes.device_plugin import registration as module
from mig_agent.frontends.kubernetes.device_plugin.registration import Offer, Readiness, Registration
from mig_agent.frontends.kubernetes.device_plugin.service import ResourceService
from mig_agent.frontends.kubernetes.resources import Resource
from support.plugged import LARGE, SMALL, devices
from support.registered import Decided


@dataclass
class Kubelet:
    """A kubelet that shows what it has taken by now."""

    has: dict[str, int] = field(default_factory=dict)
    asked: int = 0
    silent: bool = False

    async def allocatable(self) -> tuple[KubeletDevice, ...]:
        self.asked += 1
        if self.silent:
            raise KubeletError("cannot tell")
        return tuple(each for name, count in self.has.items() for each in devices(*range(count), resource=name))


@dataclass
class Story:
    kubelet: Kubelet
    registering: Registration
    told: list[bool] = field(default_factory=list)
    readiness: Readiness = field(init=False)

    async def tell(self, ready: bool) -> None:
        self.told.append(ready)

    def offer(self, name: str = SMALL) -> Offer:
        return self.registering.offers[name]

    def listens(self, *names: str) -> None:
        """The kubelet was registered with, and has opened the list."""
        for name in names:
            self.offer(name).registrations += 1
            self.offer(name).service.streams = 1

    async def look(self) -> bool:
        await self.readiness.check()
        return self.told[-1]


@pytest.fixture
def story(tmp_path: Path) -> Story:
    kubelet = Kubelet()
    registering = Registration(
        paths=KubeletPaths(tmp_path),
        kubelet=kubelet,
        on_lost=lambda _: None,
        on_taken=lambda _: None,
    )
    for name, count in ((SMALL, 7), (LARGE, 1)):
        service = ResourceService(Resource(name=name, label=name, want=profile_want("1g.10gb")), Decided(), 25.0)
        service.ids = tuple(each.id for each in devices(*range(count)))
        registering.add(service)
    found = Story(kubelet, registering)
    found.readiness = Readiness(registering, found.tell)
    return found


async def test_readiness_waits_for_every_resource_and_the_kubelets_count(story: Story) -> None:
    assert not await story.look(), "nobody listens"
    story.listens(SMALL)
    assert not await story.look(), "to one of the two"
    assert story.kubelet.asked == 0
    story.listens(LARGE)
    story.kubelet.has = {SMALL: 3, LARGE: 1}
    assert not await story.look(), "it has not taken all of them yet"
    story.kubelet.has = {SMALL: 7, LARGE: 1}
    assert await story.look()
    asked = story.kubelet.asked
    assert await story.look()
    assert story.kubelet.asked == asked, "once is enough"
    assert story.told == [False, True], "only what is new"


async def test_readiness_starts_over_when_the_kubelet_restarts(story: Story) -> None:
    story.listens(SMALL, LARGE)
    story.kubelet.has = {SMALL: 7, LARGE: 1}
    assert await story.look()
    story.offer().service.streams = 0
    assert not await story.look(), "it has gone"
    story.listens(SMALL)
    story.kubelet.has = {SMALL: 0, LARGE: 1}
    assert not await story.look(), "it is back, and has not taken them yet"
    story.kubelet.has = {SMALL: 7, LARGE: 1}
    assert await story.look()


async def test_readiness_ignores_resources_of_other_plugins(story: Story) -> None:
    story.offer().taken = True
    assert not await story.look()
    story.listens(LARGE)
    story.kubelet.has = {LARGE: 1}
    assert await story.look()
    story.offer(LARGE).taken = True
    assert await story.look(), "nothing is left to wait for"


async def test_readiness_is_immediate_without_resources(story: Story) -> None:
    """The agent offers nothing while it is paused from the start, or there is no GPU in MIG mode."""
    story.registering.offers.clear()
    assert await story.look()
    assert story.kubelet.asked == 0


async def test_readiness_ignores_later_changes(story: Story) -> None:
    story.listens(SMALL, LARGE)
    story.kubelet.has = {SMALL: 7, LARGE: 1}
    assert await story.look()
    story.offer().service.ids = ()
    story.kubelet.has = {}
    assert await story.look()


@pytest.mark.parametrize("silent", [True, False])
async def test_readiness_wait_for_a_silent_kubelet_is_bounded(
    story: Story, monkeypatch: pytest.MonkeyPatch, *, silent: bool
) -> None:
    story.listens(SMALL, LARGE)
    story.kubelet.silent = silent
    assert not await story.look()
    monkeypatch.setattr(module, "CONFIRM_SECONDS", -1.0)
    assert await story.look()
