"""Claims are prepared on exactly their slots, once, and unprepared from the ledger alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mig_agent.adapters.cdi import CDI_KIND, CdiFolder
from mig_agent.core.dra.devices import slots_by_name
from mig_agent.core.errors import MigAgentError
from mig_agent.core.model import InstanceState
from mig_agent.core.owner import Claim, ClaimOwner
from mig_agent.frontends.kubernetes.dra.claims import WAIT_SECONDS, Claims, PreparedDevice, message_of
from support.claims import NODE, ClaimsApi
from support.engine import Node, engine


@dataclass
class Claiming:
    """A node, its API server, and the claims under test."""

    node: Node
    api: ClaimsApi
    claims: Claims
    folder: Path

    def device(self, profile: str, start: int) -> str:
        """The name of a device of the only GPU."""
        gpu = self.node.gpu()
        names = slots_by_name(gpu.uuid, gpu.layout).items()
        return next(name for name, slot in names if (slot.profile.name, slot.placement.start) == (profile, start))

    async def prepare(self, *claims: Claim) -> list[tuple[PreparedDevice, ...]]:
        """What the kubelet gets, which is no error."""
        prepared = []
        for each in (await self.claims.prepare(claims)).values():
            assert not isinstance(each, MigAgentError), message_of(each)
            prepared.append(each)
        return prepared

    async def error(self, claim: Claim) -> str:
        answer = (await self.claims.prepare([claim]))[claim.uid]
        assert isinstance(answer, MigAgentError)
        return message_of(answer)

    def variables(self, device: PreparedDevice) -> dict[str, str]:
        """Of the CDI file of a prepared device."""
        name = device.cdi.partition("=")[2]
        (found,) = json.loads((self.folder / f"mig-agent.io-mig_{name}.json").read_text())["devices"]
        return dict(each.split("=", 1) for each in found["containerEdits"]["env"])

    def leased(self) -> list[str]:
        return [str(each.slot) for each in self.node.instances(InstanceState.LEASED)]


@contextlib.asynccontextmanager
async def claiming(
    folder: Path, gpus: str = "h100-80gb:1", api: ClaimsApi | None = None, **changes: Any
) -> AsyncIterator[Claiming]:
    async with engine(folder, gpus, **changes) as node:
        cdi = CdiFolder(folder / "cdi", CDI_KIND, node.host, simulated=True)
        api = api or ClaimsApi()
        yield Claiming(node, api, Claims(node.manager, api, cdi, NODE), folder / "cdi")


async def test_a_claim_gets_exactly_its_slot(tmp_path: Path) -> None:
    async with claiming(tmp_path) as at:
        claim = at.api.allocated("train", at.device("2g.20gb", 2))
        ((device,),) = await at.prepare(claim)
        assert (device.request, device.pool) == ("gpu-0", "mig-agent.io/node-1")
        assert at.leased() == ["2g.20gb on slices 2-3"]
        (instance,) = at.node.instances()
        assert at.variables(device) == {"CUDA_VISIBLE_DEVICES": instance.uuid, "NVIDIA_VISIBLE_DEVICES": "void"}
        (lease,) = at.node.leases.values()
        assert lease.owner == ClaimOwner(claim=claim, devices=(device.device,))
        assert (lease.holder.name, lease.holder.tenant) == ("claim team-a/train", "namespace team-a")
        assert lease.expires_at is None


async def test_the_same_claim_again_and_at_once_is_one_lease(tmp_path: Path) -> None:
    async with claiming(tmp_path) as at:
        claim = at.api.allocated("shared", at.device("1g.10gb", 0))
        first, second = await asyncio.gather(at.prepare(claim), at.prepare(claim))
        assert first == second == await at.prepare(claim)
        assert len(at.node.leases) == at.node.creations() == 1


async def test_a_restarted_agent_gives_the_same_answer(tmp_path: Path) -> None:
    async with claiming(tmp_path) as at:
        claim, api = at.api.allocated("train", at.device("1g.10gb", 0)), at.api
        before = await at.prepare(claim)
    async with claiming(tmp_path, "", api=api) as at:
        assert await at.prepare(claim) == before
        assert len(at.node.leases) == 1


async def test_unprepare_needs_no_api_server_and_leaves_the_instance_idle(tmp_path: Path) -> None:
    async with claiming(tmp_path) as at:
        claim = at.api.allocated("train", at.device("1g.10gb", 0))
        await at.prepare(claim)
        at.api.silent = True
        await at.claims.unprepare(claim)
        await at.claims.unprepare(claim)
        assert not at.node.leases
        assert not list(at.folder.iterdir())
        assert [each.state for each in at.node.instances()] == [InstanceState.IDLE]
        at.api.silent = False
        await at.prepare(at.api.allocated("next", at.device("1g.10gb", 0)))
        assert at.node.creations() == 1, "the idle instance was reused"


async def test_a_claim_that_was_unprepared_can_be_prepared_again(tmp_path: Path) -> None:
    async with claiming(tmp_path) as at:
        claim = at.api.allocated("train", at.device("1g.10gb", 0))
        await at.prepare(claim)
        await at.claims.unprepare(claim)
        await at.prepare(claim)
        assert at.leased() == ["1g.10gb on slice 0"]


async def test_the_slot_of_a_claim_deleted_by_force_is_not_handed_over_before_unprepare(tmp_path: Path) -> None:
    """The next claim's Prepare comes while the old container still runs."""
    async with claiming(tmp_path) as at:
        old = at.api.allocated("old", at.device("7g.80gb", 0))
        await at.prepare(old)
        new = at.api.allocated("new", at.device("7g.80gb", 0))
        waiting = asyncio.create_task(at.prepare(new))
        await at.node.until(lambda: len(at.node.manager.snapshot.queue) == 1)
        (lease,) = at.node.leases.values()
        assert isinstance(lease.owner, ClaimOwner)
        assert lease.owner.claim == old
        await at.claims.unprepare(old)
        await waiting
        (lease,) = at.node.leases.values()
        assert isinstance(lease.owner, ClaimOwner)
        assert lease.owner.claim == new


async def test_a_slot_that_stays_held_is_refused_before_the_kubelets_deadline(tmp_path: Path) -> None:
    async with claiming(tmp_path) as at:
        await at.node.acquire("7g.80gb", name="alice")
        refused = asyncio.create_task(at.error(at.api.allocated("train", at.device("1g.10gb", 0))))
        await at.node.until(lambda: len(at.node.manager.snapshot.queue) == 1)
        at.node.clock.advance(WAIT_SECONDS + 1)
        words = await refused
        assert words.startswith("cannot ")
        assert "alice" in words


async def test_idle_instances_in_the_way_are_destroyed(tmp_path: Path) -> None:
    async with claiming(tmp_path) as at:
        await at.node.release(await at.node.acquire("7g.80gb"))
        await at.prepare(at.api.allocated("train", at.device("3g.40gb", 4)))
        assert at.leased() == ["3g.40gb on slices 4-7"]


async def test_all_devices_of_a_pod_are_visible_whichever_variable_wins(tmp_path: Path) -> None:
    async with claiming(tmp_path) as at:
        one = at.api.allocated("one", at.device("1g.10gb", 0), at.device("1g.10gb", 1))
        two = at.api.allocated("two", at.device("1g.10gb", 6))
        prepared = [device for each in await at.prepare(one, two) for device in each]
        uuids = {each.uuid for each in at.node.instances()}
        visible = [at.variables(each)["CUDA_VISIBLE_DEVICES"].split(",") for each in prepared]
        assert len(prepared) == len(uuids) == 3
        assert all(set(each) == uuids and len(each) == 3 for each in visible)
        assert {each[0] for each in visible} == uuids, "each names its own device first"


async def test_devices_of_other_drivers_are_left_to_them(tmp_path: Path) -> None:
    async with claiming(tmp_path) as at:
        assert await at.prepare(at.api.allocated("net", "eth0", driver="net.example.com")) == [()]
        assert not at.node.leases


async def test_what_cannot_be_prepared_says_why(tmp_path: Path) -> None:
    async with claiming(tmp_path) as at:
        claim = at.api.allocated("train", at.device("1g.10gb", 0))
        other = Claim(namespace=claim.namespace, name=claim.name, uid="another")
        assert await at.error(other) == ("cannot prepare claim team-a/train: it is gone, or another claim has its name")
        assert "no GPU of this node offers gpu-gone" in await at.error(at.api.allocated("lost", "gpu-gone"))
        at.api.silent = True
        assert "cannot reach the API server" in await at.error(claim)
        assert not at.node.leases
