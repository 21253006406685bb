"""Pausing: nothing is granted, NVML is released, leases stay, and all is found again when the agent goes on."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.adapters.ledger.store import Ledger
from mig_agent.core.errors import Reason, Refusal, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import InstanceState
from mig_agent.core.requests import profile_want
from mig_agent.engine.callers import Caller
from support.engine import ADMIN, ANYBODY, CREATE, Node, engine, killed, start
from support.ledgers import rewritten

INIT = "nvmlInitWithFlags"
SHUTDOWN = "nvmlShutdown"
COUNT = "nvmlDeviceGetCount"
DRIVER_NOT_LOADED = 9
LIBRARY_MISMATCH = 18
UNKNOWN = 999
OPERATOR = "the operator replaces the driver"
NODE_SIDE = Caller(name="node", admin=True)


def listen(node: Node) -> list[str]:
    """The names of all NVML calls from now on."""
    heard: list[str] = []
    node.driver._nvml._on_call = lambda name, _seconds, _error: heard.append(name)
    return heard


def wait_for_the_driver(node: Node, seconds: float) -> None:
    """How long from now on; by the clock on the wall, unlike the deadlines of single GPUs."""
    context = node.manager._context
    context.settings = replace(context.settings, call_deadline_seconds=seconds)


async def refused(node: Node, *wants: str, **fields: float) -> Refusal:
    with pytest.raises(RefusedError) as refusal:
        await node.acquire(*wants, **fields)
    return refusal.value.refusal


async def test_nothing_is_granted_while_paused_and_the_refusal_has_the_reason(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        answer = await node.manager.pause("driver 590", ADMIN, lasting=True)
        assert answer.driver_released
        assert answer.paused == node.manager.snapshot.paused == ("by root: driver 590",)
        refusal = await refused(node, "1g.5gb")
        assert refusal.reason is Reason.PAUSED
        assert refusal.retryable
        assert refusal.message == "cannot serve 1g.5gb: the agent is paused (by root: driver 590)"
        (planned,) = node.manager.plan([node.request("1g.5gb")])
        assert isinstance(planned, Refusal)
        assert planned.reason is Reason.PAUSED
        assert node.manager.count_creatable(profile_want("1g.5gb")) == 0


async def test_while_paused_the_driver_is_not_called(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2", idle_limit_seconds=5.0) as node:
        kept = await node.acquire("1g.5gb")
        idle = await node.acquire("2g.10gb")
        await node.release(idle)
        heard = listen(node)
        await node.manager.pause("", ADMIN, lasting=True)
        assert heard == [SHUTDOWN]
        await node.look()
        node.clock.advance(3600)
        await node.quiet()
        await node.look()
        usage = await node.manager.usage()
        assert {each.memory_used_mib for each in usage.values()} == {None}
        for refused_call in (
            node.manager.reclaim((), ADMIN),
            node.manager.set_mig_mode("0", False, ADMIN),
            node.acquire("1g.5gb"),
        ):
            with pytest.raises(RefusedError) as refusal:
                await refused_call
            assert refusal.value.refusal.reason is Reason.PAUSED
        assert heard == [SHUTDOWN]
        assert {each.generation for each in node.instances(InstanceState.LEASED)} == {*kept.lease.instances}


async def test_leases_are_released_and_renewed_while_paused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        first, second = await node.acquire("1g.5gb"), await node.acquire("1g.5gb", ttl_seconds=50)
        await node.manager.pause("", ADMIN, lasting=True)
        heard = listen(node)
        await node.release(first)
        await node.manager.renew(second.lease.id, second.token, 5000, ANYBODY)
        node.clock.advance(100)
        await node.quiet()
        assert set(node.leases) == {second.lease.id}
        assert sorted(each.state for each in node.instances()) == [InstanceState.IDLE, InstanceState.LEASED]
        again = await node.manager.acquire(
            node.request("1g.5gb", request_id=second.lease.request_id, ttl_seconds=50), ANYBODY
        )
        assert again.lease.id == second.lease.id
        assert not heard
        await node.manager.resume("", ADMIN, lasting=True)
        assert node.manager.snapshot.paused == ()
        reused = await node.acquire("1g.5gb")
        assert reused.devices[0].reused


async def test_waiting_requests_are_served_after_the_pause(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        full = await node.acquire("7g.40gb")
        waiting = node.start(node.acquire("1g.5gb", wait_seconds=math.inf))
        await node.until(lambda: node.manager.snapshot.queue)
        await node.manager.pause("", ADMIN, lasting=True)
        await node.release(full)
        await node.quiet_but(waiting)
        assert [each.place.position for each in node.manager.snapshot.queue] == [1]
        assert not waiting.done()
        await node.manager.resume("", ADMIN, lasting=True)
        assert (await waiting).devices[0].profile == "1g.5gb"


async def test_a_request_that_may_wait_does_so_while_the_agent_is_paused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        await node.manager.pause("driver", ADMIN, lasting=True)
        waiting = node.start(node.acquire("1g.5gb", wait_seconds=600.0))
        await node.until(lambda: node.manager.snapshot.queue)
        late = node.start(refused(node, "1g.5gb", wait_seconds=10.0))
        await node.until(lambda: len(node.manager.snapshot.queue) == 2)
        node.clock.advance(10)
        assert (await late).reason is Reason.WAITED_TOO_LONG
        assert not node.creations()
        await node.manager.resume("", ADMIN, lasting=True)
        assert (await waiting).devices[0].profile == "1g.5gb"


async def test_a_request_that_these_gpus_can_never_serve_does_not_wait_for_the_end_of_a_pause(tmp_path: Path) -> None:
    async with engine(tmp_path / "one", "a100-40gb:1") as node:
        await node.manager.pause("driver", ADMIN, lasting=True)
        assert (await refused(node, "80G", wait_seconds=600.0)).reason is Reason.TOO_LARGE
    (tmp_path / "none").mkdir()
    async with engine(tmp_path / "none", "a100-40gb:1", opened=False, paused=("no GPU",)) as node:
        assert (await refused(node, "1g.5gb", wait_seconds=600.0)).reason is Reason.PAUSED


async def test_a_wait_that_times_out_while_paused_says_why(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        await node.acquire("7g.40gb")
        waiting = node.start(refused(node, "1g.5gb", wait_seconds=10.0))
        await node.until(lambda: node.manager.snapshot.queue)
        await node.manager.pause("driver", ADMIN, lasting=True)
        node.clock.advance(10)
        refusal = await waiting
        assert refusal.reason is Reason.WAITED_TOO_LONG
        assert "the agent is paused (by root: driver)" in refusal.message


async def test_steps_in_progress_end_before_the_driver_is_released(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        node.simulator.hang(CREATE)
        asked = node.start(node.acquire("1g.5gb"))
        await node.stuck()
        pausing = node.start(node.manager.pause("", ADMIN, lasting=True))
        await node.until(lambda: node.manager.snapshot.paused)
        await node.quiet_but(asked, pausing)
        heard = listen(node)
        node.simulator.clear()
        granted = await asked
        assert (await pausing).driver_released
        assert heard.count(SHUTDOWN) == 1
        assert heard[-1] == SHUTDOWN
        assert set(node.leases) == {granted.lease.id}


async def test_several_reasons_hold_at_once(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        await node.manager.pause(OPERATOR, NODE_SIDE)
        heard = listen(node)
        assert (await node.manager.pause("mine", ADMIN, lasting=True)).paused == (OPERATOR, "by root: mine")
        assert (await node.manager.pause("", ADMIN, lasting=True)).paused == (OPERATOR, "by root: mine")
        assert (await node.manager.resume("", ADMIN, lasting=True)).paused == (OPERATOR,)
        assert (await node.manager.resume("something else", NODE_SIDE)).paused == (OPERATOR,)
        assert not heard
        answer = await node.manager.resume(OPERATOR, NODE_SIDE)
        assert (answer.paused, answer.driver_released) == ((), False)
        await node.acquire("1g.5gb")


async def test_a_driver_upgrade_that_took_the_instances_ends_their_leases(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        lost = await node.acquire("1g.5gb", gpus=("0",))
        kept = await node.acquire("2g.10gb", gpus=("1",))
        await node.manager.pause("", ADMIN, lasting=True)
        node.simulator.destroy_foreign(node.where(lost))
        assert set(node.leases) == {lost.lease.id, kept.lease.id}
        await node.manager.resume("", ADMIN, lasting=True)
        assert set(node.leases) == {kept.lease.id}
        (ended,) = node.told(EventKind.LEASE_ENDED)
        assert (ended.lease, ended.data["reason"]) == (lost.lease.id, "gpu-reset")


@pytest.mark.parametrize("call", [INIT, COUNT])
async def test_a_driver_that_does_not_answer_yet_is_tried_again(tmp_path: Path, call: str) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        kept = await node.acquire("1g.5gb")
        await node.manager.pause("", ADMIN, lasting=True)
        node.simulator.fail(call, DRIVER_NOT_LOADED, times=None)
        answer = await node.manager.resume("", ADMIN, lasting=True)
        assert answer.message.startswith("cannot take up again: ")
        assert answer.paused == (answer.message,)
        assert answer.driver_released
        assert (await refused(node, "1g.5gb")).reason is Reason.PAUSED
        node.clock.advance(10)
        await node.quiet()
        assert node.manager.snapshot.paused
        assert len(node.told(EventKind.DRIVER_UNAVAILABLE)) == 1  # told once, not at each try
        node.simulator.clear()
        node.clock.advance(10)
        await node.until(lambda: not node.manager.snapshot.paused)
        assert set(node.leases) == {kept.lease.id}
        assert (await node.acquire("1g.5gb")).devices


async def test_an_outdated_library_is_reported(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        told: list[str] = []
        node.manager.on_outdated.append(lambda: told.append("outdated"))
        await node.manager.pause("", ADMIN, lasting=True)
        node.simulator.fail(INIT, DRIVER_NOT_LOADED)
        node.simulator.fail(INIT, LIBRARY_MISMATCH)
        await node.manager.resume("", ADMIN, lasting=True)
        assert not told
        node.clock.advance(10)
        await node.until(lambda: told)
        node.clock.advance(10)
        await node.until(lambda: not node.manager.snapshot.paused)


async def test_a_driver_that_hangs_while_it_is_opened_holds_up_nothing(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        kept = await node.acquire("1g.5gb")
        await node.manager.pause("", ADMIN, lasting=True)
        node.simulator.hang(INIT)
        wait_for_the_driver(node, 0.2)
        answer = await node.manager.resume("", ADMIN, lasting=True)
        assert "no answer in 0.2 s" in answer.message
        assert not answer.driver_released
        # Paused again: it may come open still, and then it is released.
        assert "it is being opened still" in (await node.manager.pause("", ADMIN, lasting=True)).message
        await node.release(kept)
        wait_for_the_driver(node, 30.0)
        node.simulator.clear()
        await node.until(lambda: node.driver._nvml._session.is_open)
        node.clock.advance(10)
        await node.until(lambda: not node.driver._nvml._session.is_open)
        await node.quiet()
        answer = await node.manager.pause("", ADMIN, lasting=True)
        assert (answer.driver_released, answer.message) == (True, "")
        assert (await node.manager.resume("", ADMIN, lasting=True)).paused == ()
        await node.acquire("1g.5gb")


async def test_a_driver_that_hangs_after_it_was_opened_is_released(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        kept = await node.acquire("1g.5gb")
        await node.manager.pause("", ADMIN, lasting=True)
        node.simulator.hang(COUNT)
        wait_for_the_driver(node, 0.2)
        answer = await node.manager.resume("", ADMIN, lasting=True)
        assert "could not be counted in 0.2 s" in answer.message
        assert not answer.driver_released
        assert (await refused(node, "1g.5gb")).reason is Reason.PAUSED
        again = await node.manager.pause("", ADMIN, lasting=True)
        assert "cannot release the driver" in again.message
        wait_for_the_driver(node, 30.0)
        node.simulator.clear()
        await node.until(lambda: not node.driver._nvml._session._in_flight)
        answer = await node.manager.pause("", ADMIN, lasting=True)
        assert (answer.driver_released, answer.message) == (True, "")
        assert (await node.manager.resume("", ADMIN, lasting=True)).paused == ()
        assert set(node.leases) == {kept.lease.id}
        await node.acquire("1g.5gb")


async def test_a_hung_call_delays_the_release_of_the_driver(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        node.simulator.hang(CREATE)
        asked = node.start(refused(node, "1g.5gb"))
        await node.stuck()
        node.clock.advance(30)
        assert (await asked).reason is Reason.GPU_UNAVAILABLE
        answer = await node.manager.pause("", ADMIN, lasting=True)
        assert not answer.driver_released
        assert "cannot release the driver" in answer.message
        assert "create 1g.5gb" in answer.message
        assert answer.paused == ("by root",)
        node.simulator.clear()
        lane = node.manager._context.gpu_workers[node.gpu().uuid]
        await node.until(lambda: not lane.hung)
        node.clock.advance(10)
        await node.until(lambda: node.told(EventKind.DRIVER_RELEASED))
        await node.manager.resume("", ADMIN, lasting=True)
        assert node.gpu().state == "ready"
        assert (await node.acquire("7g.40gb")).devices


async def test_a_pause_survives_a_restart_and_the_driver_is_not_called_at_the_start(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:1")
    kept = await node.acquire("1g.5gb")
    gone = await node.acquire("1g.5gb")
    idle = await node.acquire("2g.10gb")
    await node.release(idle)
    await node.manager.pause("driver 590", ADMIN, lasting=True)
    await killed(node)
    node.simulator.fail(INIT, DRIVER_NOT_LOADED, times=None)
    async with engine(tmp_path, opened=False, clock=node.clock) as again:
        assert again.manager.snapshot.paused == ("by root: driver 590",)
        assert set(again.leases) == {kept.lease.id, gone.lease.id}
        assert again.layout() == "0:2g.10gb=idle 4:1g.5gb=leased 6:1g.5gb=leased"
        heard = listen(again)
        await again.release(gone)
        await again.look()
        assert (await refused(again, "1g.5gb")).reason is Reason.PAUSED
        assert not heard
        # There is no driver yet: the agent lives on.
        assert (await again.manager.resume("", ADMIN, lasting=True)).paused
        again.simulator.clear()
        again.clock.advance(10)
        await again.until(lambda: not again.manager.snapshot.paused)
        assert again.layout() == "0:2g.10gb=idle 4:1g.5gb=idle 6:1g.5gb=leased"
        assert set(again.leases) == {kept.lease.id}
        assert (await again.acquire("2g.10gb")).devices


async def test_an_agent_that_starts_paused_shows_the_last_known_gpus(tmp_path: Path) -> None:
    """All of it, but that nobody was asked; and what happened meanwhile is found afterwards."""
    node = await start(tmp_path, "a100-40gb:1,h100-80gb:1,t4:1")
    first, second = await node.acquire("1g.5gb", gpus=("0",)), await node.acquire("2g.20gb", "1g.10gb", gpus=("1",))
    await node.manager.cordon("1", on=True, reason="fan", caller=ADMIN)
    await node.manager.pause("", ADMIN, lasting=True)
    before = node.manager.snapshot.view
    await killed(node)
    async with engine(tmp_path, opened=False, clock=node.clock) as again:
        after = again.manager.snapshot.view
        assert after.gpus == before.gpus
        assert after.leases == before.leases
        assert again.manager.count_creatable(profile_want("1g.5gb")) == 0
        again.simulator.destroy_foreign(again.where(first))
        await again.release(second)
        await again.manager.resume("", ADMIN, lasting=True)
        assert not again.leases
        assert [each.state for each in again.instances(gpu=1)] == [InstanceState.IDLE] * 2
        assert again.layout(0) == ""
        assert again.gpu(1).state == "cordoned"
        assert (await again.acquire("7g.40gb")).devices


async def test_a_gpu_removed_during_a_pause_is_not_managed(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:2")
    first, second = await node.acquire("1g.5gb", gpus=("0",)), await node.acquire("1g.5gb", gpus=("1",))
    await node.manager.pause("", ADMIN, lasting=True)
    await killed(node)
    # The record is of a machine with one GPU more than there is now.
    with rewritten(node.ledger.path) as ledger:
        gone = node.gpu(1).uuid
        for table, column in (("gpu", "uuid"), ("instance", "gpu")):
            ledger.execute(f"UPDATE {table} SET {column} = 'GPU-gone' WHERE {column} = ?", (gone,))  # noqa: S608 -- of constants
    async with engine(tmp_path, opened=False, clock=node.clock) as again:
        assert {each.uuid for each in again.manager.snapshot.view.gpus} == {node.gpu(0).uuid, "GPU-gone"}
        await again.manager.resume("", ADMIN, lasting=True)
        assert {each.uuid for each in again.manager.snapshot.view.gpus} == {node.gpu(0).uuid, gone}
        assert set(again.leases) == {first.lease.id}
        (ended,) = again.told(EventKind.LEASE_ENDED)
        assert (ended.lease, ended.data["reason"]) == (second.lease.id, "gpu-lost")


async def test_only_an_administrators_reason_is_recorded(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:1")
    await node.manager.pause(OPERATOR, NODE_SIDE)
    await killed(node)
    async with engine(tmp_path) as again:
        assert again.manager.snapshot.paused == ()
        await again.acquire("1g.5gb")


async def test_an_agent_can_be_started_with_a_reason(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", opened=False, paused=(OPERATOR,)) as node:
        assert node.manager.snapshot.paused == (OPERATOR,)
        assert not node.manager.snapshot.view.gpus
        assert (await node.manager.resume(OPERATOR, NODE_SIDE)).paused == ()
        await node.acquire("1g.5gb")
        (opened,) = node.told(EventKind.DRIVER_OPENED)
        assert opened.message == "the driver was opened again: version 580.95.05"


async def test_a_reboot_while_paused_ends_the_leases_with_no_driver(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:1")
    lost = await node.acquire("1g.5gb")
    await node.manager.pause("", ADMIN, lasting=True)
    await killed(node)
    node.simulator.reboot(keep_mig_mode=True)
    async with engine(tmp_path, opened=False) as again:
        assert not again.leases
        told = await again.manager.history.events(0.0, None, 100)
        (ended,) = (each for each in told if each.kind is EventKind.LEASE_ENDED)
        assert (ended.lease, ended.data["reason"]) == (lost.lease.id, "reboot")
        await again.manager.resume("", ADMIN, lasting=True)
        assert again.layout() == ""


async def test_a_gpu_that_hung_is_used_again_after_a_pause(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        node.simulator.hang(CREATE)
        asked = node.start(refused(node, "1g.5gb"))
        await node.stuck()
        node.clock.advance(30)
        await asked
        pausing = node.start(node.manager.pause("", ADMIN, lasting=True))
        await node.until(lambda: node.manager.snapshot.paused)
        node.simulator.clear()  # the call comes back while the agent is paused
        await pausing
        node.clock.advance(10)
        await node.manager.resume("", ADMIN, lasting=True)
        await node.until(lambda: node.gpu().state == "ready")


async def test_pausing_and_resuming_in_quick_succession_ends_as_last_asked(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2", listen_to_driver=True) as node:
        for _ in range(3):
            asked = [
                node.start(node.manager.pause("", ADMIN, lasting=True)),
                node.start(node.manager.resume("", ADMIN, lasting=True)),
                node.start(node.manager.pause(OPERATOR, NODE_SIDE)),
                node.start(node.manager.resume(OPERATOR, NODE_SIDE)),
            ]
            await asyncio.gather(*asked)
        await node.until(lambda: not node.manager.snapshot.paused)
        await node.acquire("1g.5gb")
        assert (await node.manager.pause("", ADMIN, lasting=True)).driver_released


async def test_a_pause_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "_commit", _full)
            with pytest.raises(RefusedError, match="cannot pause, since it cannot be recorded") as refusal:
                await node.manager.pause("", ADMIN, lasting=True)
        assert refusal.value.refusal.reason is Reason.LEDGER_FAILED
        assert node.manager.snapshot.paused == ()
        await node.acquire("1g.5gb")


def _full(*_: object) -> None:
    raise OverflowError("database or disk is full")


async def test_pauses_are_recorded_as_events(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        await node.manager.pause("driver 590", ADMIN, lasting=True)
        await node.manager.resume("", ADMIN, lasting=True)
        told = [
            each
            for each in await node.manager.history.events(0.0, None, 100)
            if "paus" in each.kind or "resum" in each.kind
        ]
        assert [(each.kind, each.message, each.data["by"], each.data["role"]) for each in told] == [
            (EventKind.AGENT_PAUSED, "the agent was paused (by root: driver 590)", "root", "admin"),
            (EventKind.AGENT_RESUMED, "the agent was resumed by root", "root", "admin"),
        ]


async def test_nodes_of_the_driver_that_stay_open_are_named(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        held = node.simulator.host_root / "dev/nvidia0"
        held.parent.mkdir(parents=True, exist_ok=True)
        with held.open("w", encoding="ascii"):
            await node.manager.pause("", ADMIN, lasting=True)
            await node.until(lambda: node.told(EventKind.DRIVER_RELEASED))
        (told,) = node.told(EventKind.DRIVER_RELEASED)
        assert told.message == f"the driver was released, but this process still has {held} open"


async def test_an_agent_that_starts_without_a_driver_opens_it_as_soon_as_there_is_one(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        kept = await node.acquire("1g.5gb")
    async with engine(tmp_path, opened=False, no_driver="no library") as node:
        words = "cannot open the driver: no library; it is tried every 10 s"
        assert node.manager.paused == (words,)
        assert set(node.leases) == {kept.lease.id}
        recorded = await node.manager.history.events(0.0, None, 1000)
        started = [each.message for each in recorded if each.kind is EventKind.AGENT_STARTED]
        assert started[-1] == f"the agent started paused ({words}) with 1 lease"
        assert [each.message for each in recorded if each.kind is EventKind.DRIVER_UNAVAILABLE] == [words]
        node.clock.advance(10)
        await node.until(lambda: not node.manager.paused)
        assert set(node.leases) == {kept.lease.id}
        await node.acquire("1g.5gb")


async def test_an_administrators_pause_comes_before_a_missing_driver(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        await node.manager.pause("", ADMIN, lasting=True)
    async with engine(tmp_path, opened=False, no_driver="no library") as node:
        assert node.manager.paused == ("by root",)
        node.clock.advance(60)
        await node.quiet()
        assert node.manager.paused == ("by root",)
        await node.manager.resume("", ADMIN, lasting=True)
        assert not node.manager.paused
