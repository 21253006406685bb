"""Shares of GPUs without MIG: what is leased, how it is enforced, and what becomes of it after each kind of end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from mig_agent.adapters.ledger.store import LEDGER_FILE, Ledger
from mig_agent.adapters.shares.mps import MpsDaemons
from mig_agent.core.errors import DriverErrorKind, Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Generation, Holder, InstanceState, Isolation, Want
from mig_agent.core.requests import memory_want
from mig_agent.core.shares import Enforcement, Fractions
from mig_agent.engine.results import Granted
from mig_agent.frontends.grpc.encode_shares import account_of_shares
from mig_agent.simulator import Code
from support.agent import short_folder
from support.engine import A_POD, Node, engine, killed, start
from support.mps import stand_in
from support.nvmlfaults import codes_of
from support.shares import OVERHEAD_MIB, FileEnforcer, mps_enforcer

WHOLE = Want(whole_gpu=True, text="a whole GPU")
L40S_MIB, RESERVED_MIB, HEADROOM_MIB = 46068, 512, 512
USABLE_MIB = L40S_MIB - RESERVED_MIB - HEADROOM_MIB


@pytest.fixture
def enforcer(tmp_path: Path) -> FileEnforcer:
    return FileEnforcer(tmp_path / "shares")


@contextlib.asynccontextmanager
async def sharing(folder: Path, there: str, enforcer: FileEnforcer, **changes: Any) -> AsyncIterator[Node]:
    async with engine(folder, there, enforcers=lambda _driver, _host: (enforcer,), **changes) as node:
        yield node


def generation(granted: Granted) -> Generation:
    return granted.devices[0].generation


async def refused(node: Node, *wants: str | Want, **fields: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await node.acquire(*wants, **fields)
    return caught.value


async def test_a_share_is_leased_used_once_and_ended(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        granted = await node.acquire("4G")
        (device,) = granted.devices
        assert (device.profile, device.memory_mib, device.reused) == ("share.3815m", 3815, False)
        assert (device.enforced_by, device.uuid) == (Enforcement.MPS, device.gpu)
        assert granted.environment == {
            "CUDA_VISIBLE_DEVICES": device.gpu,
            "NVIDIA_VISIBLE_DEVICES": device.gpu,
            "SHARE": str(device.generation),
        }
        assert enforcer.limits(device.gpu) == {device.generation: 3815}
        assert {each.kind.name: each.state.value for each in node.instances()} == {"whole": "idle", "share": "leased"}
        assert (await refused(node, WHOLE)).refusal.reason is Reason.NO_CAPACITY
        await node.release(granted)
        await node.quiet()
        assert enforcer.existing() == ()
        assert [each.kind.name for each in node.instances()] == ["whole"]
        assert (await node.acquire(WHOLE)).devices[0].enforced_by is None
        assert (await refused(node, "4G")).refusal.reason is Reason.NO_CAPACITY


async def test_a_gpu_is_filled_to_its_usable_memory_and_no_further(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        quarters = [await node.acquire(Want(fraction=0.25)) for _ in range(4)]
        limits = enforcer.limits(quarters[0].devices[0].gpu)
        assert sum(limits.values()) + 4 * OVERHEAD_MIB <= USABLE_MIB
        refusal = (await refused(node, Want(fraction=0.125))).refusal
        assert refusal.reason is Reason.NO_CAPACITY
        assert "alice" in str(refusal)


async def test_mig_goes_first_and_can_be_insisted_on(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s,h100-80gb", enforcer) as node:
        assert (await node.acquire("4G")).devices[0].profile == "1g.10gb"
        there = await node.acquire("4G", gpus=("0",))
        assert there.devices[0].enforced_by is Enforcement.MPS
    async with sharing(tmp_path, "", enforcer, isolation=Isolation.MIG) as node:
        assert (await refused(node, "4G", gpus=("0",))).refusal.reason is Reason.NO_MIG_GPU
        await node.acquire(_any("4G"), gpus=("0",))


def _any(text: str) -> Want:
    want = memory_want(text)
    return Want(memory_bytes=want.memory_bytes, text=want.text, isolation=Isolation.ANY)


async def test_pods_get_no_share(tmp_path: Path, enforcer: FileEnforcer) -> None:
    """Nothing brings a daemon's folder into a container, and without it nothing would limit the memory."""
    async with sharing(tmp_path, "l40s", enforcer) as node:
        assert (await refused(node, "4G", pod=A_POD)).refusal.reason is Reason.NO_MIG_GPU


@pytest.mark.parametrize("fractions", [Fractions.OFF, Fractions.CGROUP, Fractions.PRELOAD])
async def test_a_way_that_does_not_work_gives_no_shares(
    tmp_path: Path, enforcer: FileEnforcer, fractions: Fractions
) -> None:
    async with sharing(tmp_path, "l40s", enforcer, fractions_by_gpu={"0": fractions}) as node:
        await refused(node, "4G")
        await node.acquire(WHOLE)


async def test_who_uses_a_share_is_told_to_its_enforcer(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        granted = await node.acquire("4G", holder=Holder(name="alice", uid=1234))
        assert enforcer._read(generation(granted))["uid"] == 1234


async def test_what_is_released_is_free_at_once(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        for _ in range(3):
            await node.release(await node.acquire("40G"))
        assert not enforcer.existing()


async def test_shares_are_shown_also_where_no_more_are_allowed(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        granted = await node.acquire("4G")
        node.manager.reconfigure(replace(node.settings, fractions=Fractions.OFF))
        await node.look()
        account = account_of_shares(node.gpu())
        assert account is not None
        assert (account.enforced_by, account.usable_mib, account.taken_mib) == ("mps", L40S_MIB, 3815)
        await node.release(granted)
        assert account_of_shares(node.gpu()) is None


async def test_a_headroom_that_leaves_nothing_is_named(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer, share_headroom_mib=L40S_MIB) as node:
        assert "share_headroom leaves less than the smallest share" in node.gpu().not_shared
        assert "share_headroom" in (await refused(node, "4G")).refusal.hint


async def test_a_share_that_cannot_be_set_up_leaves_nothing(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        for left_behind in (False, True):
            enforcer.fail("begin", left_behind=left_behind)
            refusal = (await refused(node, "4G")).refusal
            assert (refusal.reason, "on demand" in refusal.message) == (Reason.DRIVER_FAILED, True)
            await node.quiet()
            assert enforcer.existing() == ()
            assert [each.kind.name for each in node.instances()] == ["whole"]
        # Nor what could not be removed at once.
        enforcer.fail("begin", left_behind=True)
        enforcer.fail("end")
        await refused(node, "4G")
        await node.quiet()
        assert enforcer.existing() == ()
        await node.acquire(WHOLE)


async def test_a_share_that_cannot_be_ended_is_ended_later(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        granted = await node.acquire("4G")
        enforcer.fail("end")
        await node.release(granted)
        await node.quiet()
        assert [each.message for each in node.told(EventKind.STEP_FAILED)]
        assert {each.kind.name: each.state.value for each in node.instances()}["share"] == "destroying"
        assert (await refused(node, WHOLE)).refusal.retryable
        await node.look()
        await node.quiet()
        assert enforcer.existing() == ()
        await node.acquire(WHOLE)


async def test_a_share_whose_limit_is_lost_ends_with_its_lease(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        lost, kept = await node.acquire("4G"), await node.acquire("4G")
        enforcer.fail("check", DriverErrorKind.TIMEOUT)  # no answer is no loss
        await node.look()
        assert lost.lease.id in node.leases
        enforcer.lose(generation(lost))
        await node.look()
        await node.quiet()
        assert set(node.leases) == {kept.lease.id}
        assert enforcer.existing() == ((None, generation(kept)),)
        (event,) = node.told(EventKind.LEASE_ENDED)
        assert event.message.endswith("its memory limit does not hold any more")
        (event,) = node.told(EventKind.INSTANCE_LOST)
        assert event.message == (
            "the limit of the share of 3.72 GiB of GPU 0 does not hold any more: what enforces it has ended"
        )


async def test_nothing_is_shared_beside_a_process_without_a_lease(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        pid = node.simulator.occupy("0")
        assert "blocked" in str((await refused(node, "4G")).refusal)
        node.simulator.vacate(pid)
        node.clock.advance(120)
        await node.quiet()
        await node.acquire("4G")


async def test_what_others_use_of_a_shared_gpu_is_not_shared(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        granted = await node.acquire("40Gi")
        own = node.simulator.occupy("0", used_mib=30_000)
        enforcer.use(generation(granted), own)
        stranger = node.simulator.occupy("0", used_mib=2000)
        await node.look()
        assert granted.lease.id in node.leases
        shares = node.gpu().layout.shares
        assert shares is not None
        assert (shares.usable_mib, shares.others_mib) == (USABLE_MIB, 2048)
        refusal = (await refused(node, "3Gi")).refusal
        assert (refusal.reason, refusal.retryable) == (Reason.NO_CAPACITY, True)
        node.simulator.vacate(stranger)
        await node.look()
        await node.acquire("3Gi")


async def test_a_waiting_request_gets_what_a_share_leaves(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        first = await node.acquire("30G")
        waiting = node.start(node.acquire(WHOLE, wait_seconds=600.0))
        await node.until(lambda: node.manager.snapshot.queue)
        await node.release(first)
        await waiting
        assert enforcer.existing() == ()


async def test_an_end_that_hangs_holds_no_other_gpu_up(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s:2", enforcer, call_deadline_seconds=5.0) as node:
        granted = await node.acquire("40G")
        go_on = threading.Event()
        enforcer.slow = go_on.wait  # type: ignore[assignment] # its answer is of no use
        try:
            await node.release(granted)
            await node.stuck(0)
            enforcer.slow = lambda: None
            other = await node.acquire("40G")
            assert other.devices[0].gpu_index == 1
            node.clock.advance(6.0)
            await node.until(lambda: node.gpu(0).state == "cordoned")
        finally:
            go_on.set()
        await node.until(lambda: node.gpu(0).state == "whole")
        await node.until(lambda: enforcer.existing() == ((None, generation(other)),))


# Restarts


async def test_the_next_agent_finds_its_shares(tmp_path: Path, enforcer: FileEnforcer) -> None:
    node = await start(tmp_path, "l40s:2", enforcers=lambda _driver, _host: (enforcer,))
    kept, lost = await node.acquire("4G"), await node.acquire("5G")
    await killed(node)
    enforcer.lose(generation(lost))
    enforcer._write(Generation(999), {"gpu": kept.devices[0].gpu, "limit": 1024, "pids": ()})
    async with sharing(tmp_path, "", enforcer) as node:
        await node.quiet()
        await node.look()
        assert set(node.leases) == {kept.lease.id}
        assert enforcer.existing() == ((None, generation(kept)),)
        (share,) = (each for each in node.instances(InstanceState.LEASED))
        assert share.enforced_by is Enforcement.MPS
        assert (await node.acquire("4G", gpus=("0",))).devices[0].generation > 3


async def test_a_share_that_was_never_answered_is_ended(tmp_path: Path, enforcer: FileEnforcer) -> None:
    node = await start(tmp_path, "l40s", enforcers=lambda _driver, _host: (enforcer,))
    there, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        there.set()
        go_on.wait()

    enforcer.slow = wait
    task = node.start(node.acquire("4G"))
    await asyncio.to_thread(there.wait)
    ending = asyncio.ensure_future(killed(node))
    await asyncio.sleep(0.05)
    enforcer.slow = lambda: None
    go_on.set()
    await ending
    task.cancel()
    await asyncio.wait([task])
    assert len(enforcer.existing()) == 1
    async with sharing(tmp_path, "", enforcer) as node:
        await node.quiet()
        assert enforcer.existing() == ()
        assert [each.kind.name for each in node.instances()] == ["whole"]
        assert not node.leases


async def test_a_reboot_ends_all_shares(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        await node.acquire("4G")
        node.simulator.reboot()
        await node.look()
        await node.look()
        assert not node.leases
        assert enforcer.existing() == ()
        await node.acquire(WHOLE)


async def test_a_gpu_that_is_not_managed_keeps_its_shares(tmp_path: Path, enforcer: FileEnforcer) -> None:
    node = await start(tmp_path, "l40s:2", enforcers=lambda _driver, _host: (enforcer,))
    granted = await node.acquire("4G", gpus=("1",))
    await killed(node)
    async with sharing(tmp_path, "", enforcer, gpus=("0",)) as node:
        await node.look()
        assert enforcer.existing() == ((None, generation(granted)),)


async def test_the_ledger_keeps_how_a_share_is_enforced(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        granted = await node.acquire("4G")
    ledger = Ledger.open(tmp_path / LEDGER_FILE)
    found = {each.generation: each.enforced_by for each in ledger.contents.instances}
    assert found[generation(granted)] is Enforcement.MPS
    assert set(found.values()) == {None, Enforcement.MPS}
    ledger.close()


# The driver


@pytest.mark.parametrize("call", ["nvmlDeviceGetComputeMode", "nvmlDeviceGetMemoryInfo_v2"])
async def test_a_driver_that_does_not_tell_gives_no_new_shares_and_takes_none(call: str) -> None:
    with short_folder() as folder:
        async with engine(folder, "l40s:2", enforcers=mps_enforcer) as node:
            kept = await node.acquire("4G")
            for code in set(codes_of("nvmlDeviceGetComputeMode")) - {Code.GPU_IS_LOST}:
                node.simulator.fail(call, code, times=None)
                for _ in range(4):
                    await node.look()
                assert set(node.leases) == {kept.lease.id}
                await refused(node, "4G")
                await node.release(await node.acquire(WHOLE))
                node.simulator.clear()
                await node.look()
                await node.release(await node.acquire("4G"))
                await node.quiet()


# With the daemons of MPS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts daemons for others")
async def test_mps_daemons_come_and_go_with_leases() -> None:
    with short_folder() as folder:
        async with engine(folder, "l40s", enforcers=mps_enforcer) as node:
            granted = await node.acquire("4G")
            number = generation(granted)
            home = node.host.root / "run/mps"
            daemons = MpsDaemons(home, search_path="")
            (daemon,) = daemons.pids(number)
            assert granted.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(home / str(number) / "pipe")
            assert granted.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=3815M"
            os.kill(daemon, signal.SIGSTOP)
            await node.look()  # it answers no command, and its clients go on
            assert granted.lease.id in node.leases
            await node.release(granted)
            await node.quiet()
            assert (daemons.existing(), daemons.pids(number)) == ((), ())
            lost = await node.acquire("4G")
            os.kill(daemons.pids(generation(lost))[0], signal.SIGKILL)
            await node.look()
            await node.quiet()
            assert (daemons.existing(), daemons.pids(generation(lost)), node.leases) == ((), (), {})


@pytest.mark.parametrize(
    ("gpus", "why"),
    [("l40s,driver=535.261.03", "lets the holder of a share lift its limit"), ("l40s", "its compute mode is")],
)
async def test_mps_is_refused_where_it_would_not_hold(gpus: str, why: str) -> None:
    with short_folder() as folder:
        async with engine(folder, gpus, enforcers=mps_enforcer) as node:
            if "driver" not in gpus:
                pynvml.nvmlDeviceSetComputeMode(pynvml.nvmlDeviceGetHandleByIndex(0), 3)
                await node.look()
            refusal = (await refused(node, "4G")).refusal
            assert why in refusal.hint
            assert "GPU 0 cannot be shared: not by " in refusal.hint
            assert refusal.message == "cannot place 4G: GPU 0 has no MIG mode and is not shared"
            await node.acquire(WHOLE)


# What processes use


async def test_the_newest_process_above_the_limit_of_its_share_loses_the_gpu(
    tmp_path: Path, enforcer: FileEnforcer
) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        granted, other = await node.acquire("4G"), await node.acquire("4G")
        old, new = (node.simulator.occupy("0", used_mib=2000) for _ in range(2))
        enforcer.use(generation(granted), old, new)
        enforcer.use(generation(other), node.simulator.occupy("0", used_mib=3815))
        watch = node.manager._parts.share_watch
        await watch.look()
        assert enforcer.processes_ended == [(generation(granted), max(old, new))]
        await node.quiet()
        (event,) = node.told(EventKind.PROCESS_ENDED)
        assert "use 3.9 GiB of the share of 3.72 GiB of GPU 0" in event.message
        assert granted.lease.id in node.leases
        node.simulator.vacate(max(old, new))
        enforcer.use(generation(granted), old)
        await watch.look()
        assert len(enforcer.processes_ended) == 1


async def test_the_watch_looks_each_second(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        granted = await node.acquire("4G")
        enforcer.use(generation(granted), node.simulator.occupy("0", used_mib=5000))
        await node.quiet()
        node.clock.advance(1.0)
        await node.until(lambda: enforcer.processes_ended)


async def test_processes_without_a_share_are_named(tmp_path: Path, enforcer: FileEnforcer) -> None:
    async with sharing(tmp_path, "l40s", enforcer) as node:
        granted = await node.acquire("4G")
        enforcer.use(generation(granted), node.simulator.occupy("0", used_mib=500))
        node.simulator.occupy("0", name="nvidia-cuda-mps-server", used_mib=60)
        stranger = node.simulator.occupy("0", name="python sneak.py", used_mib=700)
        for _ in range(2):
            await node.manager._parts.share_watch.look()
            await node.look()
        await node.quiet()
        (event,) = node.told(EventKind.PROCESS_FOUND)
        words = f"python sneak.py (pid {stranger}) uses 700 MiB of GPU 0 without a share of it"
        assert event.message == words
        assert node.manager.snapshot.problems == (f"shares of GPU 0: {words}",)
        node.simulator.vacate(stranger)
        await node.look()
        assert not node.manager.snapshot.problems


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts daemons for others")
async def test_two_clients_of_one_share_do_not_get_more_than_its_limit_together() -> None:
    with short_folder() as folder:
        async with engine(folder, "l40s", enforcers=mps_enforcer) as node:
            granted = await node.acquire("4G")
            programs = stand_in(node.simulator, folder)
            with contextlib.ExitStack() as stack:
                clients = []
                for _ in range(2):
                    client = programs.start_cuda("alloc=2000", "hold", **granted.environment)
                    stack.callback(client.__exit__, None, None, None)
                    stack.callback(client.kill)
                    clients.append(client)
                    assert client.stdout is not None
                    while not client.stdout.readline().startswith("alloc"):
                        assert client.poll() is None
                usage = (await node.manager.usage())[generation(granted)]
                assert usage.memory_used_mib == 2 * 2512
                await node.manager._parts.share_watch.look()
                await node.quiet()
                (event,) = node.told(EventKind.PROCESS_ENDED)
                assert event.data["pid"] == clients[1].pid
                await node.until(
                    lambda: (
                        len(
                            MpsDaemons(node.host.root / "run/mps", search_path=programs.path).clients(
                                generation(granted)
                            )
                        )
                        == 1
                    )
                )
                assert clients[0].poll() is None
                await node.release(granted)
                await node.quiet()
            assert not node.instances(InstanceState.DESTROYING)
