"""The Python client against a real agent in a process of its own."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from mig_agent.client import Client, ClientError, Lease, NoAgent, Pod, Refused, UsageError, to_json
from mig_agent.client.types import NoPlan, Plan, QueuePosition
from support.agent import GENEROUS_SECONDS, Agent, eventually


def test_a_lease_lives_as_long_as_its_block(client: Client) -> None:
    with client.lease(gpu_memory="4G", gpus=[0]) as lease:
        (device,) = lease.devices
        assert device.profile == "1g.5gb"
        assert device.is_mig
        assert lease.env == {"CUDA_VISIBLE_DEVICES": device.uuid, "NVIDIA_VISIBLE_DEVICES": device.uuid}
        (there,) = client.status().leases
        assert (there.id, there.hold) == (lease.id, True)
        assert there.devices == lease.devices
    assert not client.status().leases
    assert lease.lost is None
    lease.release()  # once more is nothing


def test_an_acquired_lease_stays_until_it_is_released(agent: Agent) -> None:
    with Client(agent.address) as client:
        lease = client.acquire(gpu_memory="4G", name="alice", tenant="team-a")
    with Client(agent.address) as client:
        (there,) = client.status().leases
        assert (there.id, there.holder, there.tenant, there.hold) == (lease.id, "alice", "team-a", False)
        client.release(lease.id, lease.token)
        assert not client.status().leases


def test_a_lease_says_nothing_of_its_token(client: Client) -> None:
    with client.lease(gpu_memory="4G") as lease:
        assert lease.token
        assert lease.token not in repr(lease)


def test_renewing(client: Client) -> None:
    with client.acquire(gpu_memory="4G", ttl="10m") as lease:
        before = lease.expires_at
        assert before is not None
        lease.renew("2h")
        assert lease.expires_at is not None
        assert lease.expires_at > before + 3600
        lease.renew(None)
        assert lease.expires_at is None


def test_a_lease_is_given_by_its_id_or_as_it_is(client: Client) -> None:
    held = client.lease(gpu_memory="4G")
    kept = client.acquire(gpu_memory="4G", ttl="10m")
    assert {each.lease for each in client.events(lease=kept)} == {kept.id}
    assert client.renew(kept, ttl="2h").expires_at == kept.expires_at, "the lease knows its new deadline"
    assert client.renew(kept.grant, ttl="none").expires_at is None, "a grant has its token"
    assert client.recover(kept).lease.id == kept.id
    info = next(each for each in client.status().leases if each.id == kept.id)
    assert client.renew(info, kept.token, ttl=60).expires_at is not None
    client.release(held)
    assert held.lost is None, "it was released by its holder"
    client.release(kept)
    assert client.status().leases == ()


def test_no_deadline_goes_by_a_forgotten_argument(client: Client) -> None:
    untyped: Any = client
    with client.acquire(gpu_memory="4G", ttl="10m") as lease:
        with pytest.raises(TypeError, match="ttl"):
            untyped.renew(lease.id)
        with pytest.raises(UsageError, match="cannot take forever as a deadline"):
            client.renew(lease.id, ttl="forever")
        assert client.status().leases[0].expires_at == pytest.approx(lease.expires_at)


@pytest.mark.parametrize("method", ["release", "recover", "renew"])
def test_what_is_no_lease_is_refused_in_words(method: str, tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/nowhere.sock") as nobodys:
        call: Any = getattr(nobodys, method)
        more = {"ttl": "1h"} if method == "renew" else {}
        with pytest.raises(UsageError, match="cannot take 4711, an int, as lease"):
            call(4711, "token", **more)


def test_a_refusal_is_typed(client: Client) -> None:
    with client.lease(mig_profile="7g.40gb", name="bob"), pytest.raises(Refused) as refused:
        client.acquire(mig_profile="1g.5gb")
    error = refused.value
    assert error.reason == "no-capacity"
    assert error.retryable
    assert error.message.startswith("cannot ")
    assert str(error) == error.message
    assert "bob" in {each.holder for each in error.blockers}


@pytest.mark.parametrize(
    "asking",
    [
        {},
        {"gpu_memory": "4"},
        {"gpu_memory": "4G", "mig_profile": "1g.5gb"},
        {"gpu_fraction": 1.5},
        {"gpu_fraction": float("nan")},
        {"num_gpus": 0},
        {"gpu_memory": "4G", "gpus": ["0.2"]},
        {"gpu_memory": "4G", "wait": "10"},
        {"gpu_memory": "4G", "ttl": -1},
        {"mig_profile": "1g.5gb", "min_compute": 2},
        {"devices": ["1g.5gb", "four"]},
    ],
)
def test_what_cannot_be_meant_needs_no_agent(asking: dict[str, object], tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/none.sock") as client, pytest.raises(UsageError) as mistake:
        client.acquire(**asking)  # type: ignore[arg-type] # wrong on purpose
    assert mistake.value.message.startswith("cannot ")


def test_devices_of_several_kinds(client: Client) -> None:
    with client.lease(devices=["2g.10gb", "4G"]) as lease:
        assert lease.devices[0].profile == "2g.10gb"
        assert len(lease.env["CUDA_VISIBLE_DEVICES"].split(",")) == 2
    with client.lease(gpu_fraction=0.5, gpus=["1"]) as lease:
        assert lease.devices[0].profile == "3g.40gb"
    with client.lease(gpu_memory="4G", min_compute=2, gpus=["0"]) as lease:
        assert lease.devices[0].profile == "2g.10gb"
    with client.lease(gpu_memory="4G", attributes=["me"], gpus=["0"]) as lease:
        assert lease.devices[0].profile == "1g.5gb+me"


def test_plans(client: Client) -> None:
    plans = client.plan_each([{"gpu_memory": "4G", "gpus": ["0"]}, {"mig_profile": "9g.99gb"}])
    assert isinstance(plans[0], Plan)
    assert [each.kind for each in plans[0].steps] == ["create"]
    assert plans[0].devices[0].profile == "1g.5gb"
    assert isinstance(plans[1], NoPlan)
    assert plans[1].reason == "unknown-profile"
    assert not client.status().leases


def test_plans_and_refusals_are_explained(client: Client) -> None:
    client.acquire(mig_profile="7g.40gb", name="bob")
    plan = client.plan(gpu_memory="4G", explain=True)
    assert isinstance(plan, Plan)
    assert "(chosen)" in plan.explanation[1]
    assert plan.explanation[-1] == "  GPU 0: no place, slices 0-7 are leased to bob"
    full = client.plan(mig_profile="2g.10gb", explain=True)
    assert isinstance(full, NoPlan)
    with pytest.raises(Refused) as refused:
        client.acquire(mig_profile="2g.10gb")
    assert refused.value.explanation == full.explanation
    assert client.plan(gpu_memory="4G").explanation == ()


def test_a_plan_says_what_its_score_is_made_of(client: Client) -> None:
    create = client.plan(gpu_memory="4G", gpus=[0])
    client.acquire(gpu_memory="4G", gpus=[0]).release()
    reuse = client.plan(gpu_memory="4G", gpus=[0])
    assert isinstance(create, Plan)
    assert isinstance(reuse, Plan)
    for plan in (create, reuse):
        told = to_json.encode(plan)
        assert isinstance(told, dict)
        parts = (plan.wasted_mib, plan.capacity_lost, plan.creation_cost, plan.expected_seconds)
        assert None not in parts
        assert parts == tuple(told[key] for key in ("wasted_mib", "capacity_lost", "creation_cost", "expected_seconds"))
    assert create.creation_cost == 2.0
    assert create.expected_seconds
    assert reuse.wasted_mib == create.wasted_mib
    assert reuse.creation_cost == reuse.expected_seconds == 0.0


def test_a_revision_that_is_over_is_told_with_what_has_changed(client: Client) -> None:
    before = client.status().revision
    client.acquire(gpu_memory="4G")
    with pytest.raises(Refused) as refused:
        client.acquire(gpu_memory="4G", if_revision=before)
    error = refused.value
    assert (error.reason, error.retryable) == ("revision-changed", True)
    assert (error.revision, error.changed) == (client.status().revision, ("instance-created", "lease-granted"))
    dry = client.plan(gpu_memory="4G", if_revision=before)
    assert isinstance(dry, NoPlan)
    assert (dry.revision, dry.changed) == (error.revision, error.changed)
    with pytest.raises(Refused) as other:
        client.acquire(gpu_memory="900G")
    assert (other.value.revision, other.value.changed) == (None, ())


def test_waiting_tells_the_place_and_ends_with_the_lease(agent: Agent, client: Client) -> None:
    places: queue.Queue[int] = queue.Queue()
    got: queue.Queue[Lease] = queue.Queue()
    held = client.acquire(mig_profile="7g.40gb")

    def wait() -> None:
        with Client(agent.address) as other:
            got.put(other.acquire(mig_profile="7g.40gb", wait="5m", on_queued=places.put))

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert places.get(timeout=GENEROUS_SECONDS) == 1
    (waiting,) = client.status().queue
    assert waiting.wants == "7g.40gb"
    held.release()
    lease = got.get(timeout=GENEROUS_SECONDS)
    waiter.join(GENEROUS_SECONDS)
    assert lease.devices[0].reused


def test_looking(client: Client) -> None:
    with client.lease(gpu_memory="4G", gpus=["1"]) as lease:
        status = client.status()
        assert [each.state for each in status.gpus] == ["ready", "ready"]
        (instance,) = status.gpus[1].instances
        assert (instance.state, instance.lease) == ("leased", lease.id)
        usage = client.usage()[instance.generation]
        assert usage.memory_total_mib == lease.devices[0].memory_mib
        assert usage.utilization_percent is None
        assert usage.processes == ()
        kinds = [each.kind for each in client.events(gpu=1)]
        assert "lease-granted" in kinds
        assert len(client.events(limit=1)) == 1
        assert [each.gpus for each in client.profiles()] == [(0,), (1,)]


def test_watching(client: Client) -> None:
    revision = client.status().revision
    with client.lease(gpu_memory="4G") as lease:
        events = client.watch(after_revision=revision)
        granted = next(each for each in events if each.kind == "lease-granted")
        assert granted.lease == lease.id
        assert granted.message


def test_a_lease_is_taken_for_a_pod_by_who_may(agent: Agent, client: Client) -> None:
    train = Pod(namespace="team-a", name="train-7f2c", uid="6b8f")
    with Client(agent.address.replace("agent.sock", "admin.sock")) as scheduler:
        lease = scheduler.acquire(gpu_memory="4G", pod=train, ttl="1m", request_id=train.uid)
        again = scheduler.acquire(gpu_memory="4G", pod=train, ttl="1m", request_id=train.uid)
        assert (again.id, again.token) == (lease.id, lease.token)
        assert isinstance(scheduler.plan(gpu_memory="4G", pod=train), Plan)
    (there,) = client.status().leases
    assert (there.pod, there.arrived, there.promised) == (train, False, True)
    assert (there.holder, there.tenant) == ("pod team-a/train-7f2c", "namespace team-a")
    shown = to_json.encode(there)
    assert isinstance(shown, dict)
    assert (shown["pod"], shown["arrived"]) == (
        {"namespace": "team-a", "name": "train-7f2c", "uid": "6b8f"},
        False,
    )
    client.release(lease.id, lease.token)
    assert not client.status().leases
    with pytest.raises(UsageError, match="cannot take Train as the name of a pod"):
        client.acquire(gpu_memory="4G", pod=Pod(namespace="team-a", name="Train"))
    with pytest.raises(UsageError, match=r"cannot take .*team-a/train.*, a str, as pod"):
        client.acquire(gpu_memory="4G", pod="team-a/train")  # type: ignore[arg-type]  # what is tested


def test_administration_finds_its_own_socket(client: Client) -> None:
    lease = client.acquire(gpu_memory="4G")
    client.release(lease.id)  # no token: the administrators' socket beside the users' one
    assert [each.profile for each in client.reclaim()] == ["1g.5gb"]
    assert client.cordon(0, "a fan is broken").state == "cordoned"
    assert client.uncordon("0").state == "ready"
    change = client.set_mig_mode(1, enable=False)
    assert not change.mig.current


def test_pausing_and_resuming(client: Client) -> None:
    lease = client.acquire(gpu_memory="4G")
    paused = client.pause("a new driver")
    assert paused.driver_released
    assert paused.message == ""
    assert [each.partition(": ")[2] for each in paused.paused] == ["a new driver"]
    assert client.status().paused == paused.paused
    with pytest.raises(Refused) as refused:
        client.acquire(gpu_memory="4G")
    assert (refused.value.reason, refused.value.retryable) == ("paused", True)
    client.release(lease.id)
    assert client.pause() == paused
    resumed = client.resume()
    assert (resumed.paused, resumed.driver_released, resumed.message) == ((), False, "")
    assert client.acquire(gpu_memory="4G").devices
    assert client.resume() == resumed


def test_an_agent_that_restarts_is_waited_for(agent: Agent, client: Client) -> None:
    lease = client.acquire(gpu_memory="4G", request_id="mine")
    agent.restart_after_crash()
    assert client.status().leases[0].id == lease.id
    assert client.acquire(gpu_memory="4G", request_id="mine").id == lease.id
    lease.release()
    assert not client.status().leases


@pytest.mark.parametrize("graceful", [True, False], ids=["stopped", "killed"])
def test_a_held_lease_survives_a_restart_of_the_agent(agent: Agent, graceful: bool) -> None:
    lost: queue.Queue[ClientError] = queue.Queue()
    with Client(agent.address, patience=GENEROUS_SECONDS) as client:
        with client.lease(gpu_memory="4G", on_lost=lost.put) as lease:
            if graceful:
                assert agent.stop() == 0
                agent.start()
            else:
                agent.restart_after_crash()
            assert [each["lease"] for each in agent.ask("status")["leases"]] == [lease.id]
            assert lease.lost is None
        assert not client.status().leases
        assert f"mig-agent-hold-{lease.id}" not in {each.name for each in threading.enumerate()}
    assert lost.empty()


def test_a_held_lease_that_somebody_else_ends_is_told(agent: Agent, client: Client) -> None:
    lost: queue.Queue[ClientError] = queue.Queue()
    with client.lease(gpu_memory="4G", on_lost=lost.put) as lease:
        with Client(agent.address) as other:
            other.release(lease.id)
        error = lost.get(timeout=GENEROUS_SECONDS)
        assert isinstance(error, Refused)
        assert error.reason == "lease-ended"
        assert lease.lost is error


def test_a_client_that_is_closed_lets_its_held_leases_go(agent: Agent) -> None:
    lost: queue.Queue[ClientError] = queue.Queue()
    client = Client(agent.address)
    client.lease(gpu_memory="4G", on_lost=lost.put)
    client.close()
    eventually(lambda: not agent.ask("status")["leases"], "the lease ends")


def test_no_agent_is_told_at_once_and_in_words(tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/none.sock", patience=1000) as client, pytest.raises(NoAgent) as error:
        client.status()
    assert "there is no such socket" in error.value.message
    assert "systemctl status mig-agent" in error.value.hint
    assert error.value.retryable


# ---------------------------------------------------------------- confirming


def is_confirmed(agent: Agent, request_id: str) -> bool:
    """Whether the lease of a request stays, as whoever asks for it again is told."""
    with Client(agent.address) as client:
        return client.acquire(gpu_memory="4G", request_id=request_id, confirm=False).grant.confirm_by is None


def test_a_socket_that_closes_every_connection_is_no_matter_of_certificates(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        listening.settimeout(GENEROUS_SECONDS)

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=refuse, daemon=True).start()
        with Client(f"unix://{tmp_path}/s", patience=0.0) as client, pytest.raises(NoAgent) as refused:
            client.status()
        listening.shutdown(socket.SHUT_RDWR)
    assert "certificate" not in refused.value.hint
    assert refused.value.message.startswith("cannot reach the agent at unix://")


def test_a_lease_in_the_hand_is_confirmed(client: Client, agent: Agent) -> None:
    lease = client.acquire(gpu_memory="4G", request_id="mine")
    assert lease.grant.confirm_by is not None
    assert is_confirmed(agent, "mine")
    lease.confirm()  # nothing is left to do
    lease.release()


def test_a_lease_that_has_to_be_written_down_first_is_confirmed_when_its_holder_says_so(
    client: Client, agent: Agent
) -> None:
    lease = client.acquire(gpu_memory="4G", request_id="mine", confirm=False)
    assert not is_confirmed(agent, "mine")
    lease.confirm()
    assert is_confirmed(agent, "mine")


def test_who_closes_the_client_without_confirming_has_not_confirmed(agent: Agent) -> None:
    with Client(agent.address) as client:
        client.acquire(gpu_memory="4G", request_id="mine", confirm=False)
    assert not is_confirmed(agent, "mine")


def test_renewing_confirms_what_was_not(client: Client, agent: Agent) -> None:
    lease = client.acquire(gpu_memory="4G", request_id="mine", confirm=False)
    lease.renew(None)
    assert is_confirmed(agent, "mine")
    lease.confirm()


def test_confirming_outlives_an_agent_that_restarts(client: Client, agent: Agent) -> None:
    lease = client.acquire(gpu_memory="4G", request_id="mine", confirm=False)
    agent.kill()
    agent.start()
    lease.confirm()
    assert is_confirmed(agent, "mine")


def test_confirming_what_has_ended_is_refused(client: Client) -> None:
    lease = client.acquire(gpu_memory="4G", confirm=False)
    client.release(lease.id, lease.token)
    with pytest.raises(Refused) as refused:
        lease.confirm()
    assert refused.value.reason == "lease-ended"


def test_the_threads_in_which_requests_are_sent_end_with_their_calls(client: Client) -> None:
    client.acquire(gpu_memory="4G").release()
    before = threading.active_count()
    for _ in range(10):
        client.acquire(gpu_memory="4G").release()
        client.acquire(gpu_memory="4G", confirm=False).release()
        with pytest.raises(Refused):
            client.acquire(gpu_memory="900G")
    eventually(lambda: threading.active_count() <= before, "nothing runs any more")


def test_a_wait_says_when_it_is_likely_to_start_and_what_blocks_it(client: Client, agent: Agent) -> None:
    with (
        client.lease(mig_profile="7g.40gb", ttl="10m", name="train") as held,
        Client(agent.address) as other,
    ):
        refused = other.plan(mig_profile="7g.40gb", estimate=True)
        assert isinstance(refused, NoPlan)
        assert refused.estimate is not None, "no lease has ended, but this one has a deadline"
        assert (refused.estimate.basis, refused.estimate.median) == ("deadlines", None)
        assert 590 < (refused.estimate.latest or 0) <= 600
        quick = other.plan(mig_profile="7g.40gb")
        assert isinstance(quick, NoPlan)
        assert quick.estimate is None, "it was not asked for"
        positions: queue.SimpleQueue[QueuePosition] = queue.SimpleQueue()
        waiting = threading.Thread(
            target=lambda: other.lease(mig_profile="7g.40gb", wait="5m", on_queued=positions.put).release()
        )
        waiting.start()
        first = positions.get(timeout=GENEROUS_SECONDS)
        assert (first, first.blockers[0].lease, first.blockers[0].expires_at) == (1, held.id, held.grant.expires_at)
        second = positions.get(timeout=GENEROUS_SECONDS)
        assert second.estimate is not None
        (entry,) = client.status().queue
        assert entry.estimate is not None
        assert entry.estimate.basis == second.estimate.basis == "deadlines"
        held.release()
        waiting.join(GENEROUS_SECONDS)
        assert not waiting.is_alive()
