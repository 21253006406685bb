"""Shares on the wire and in the metrics, from a real engine; and what nodes that share GPUs show to Kubernetes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent import __version__
from mig_agent.client import decode
from mig_agent.client.types import Status
from mig_agent.core.errors import UsageError
from mig_agent.core.model import Isolation, NodeView, Want, whole_gpu_layout
from mig_agent.core.requests import memory_want
from mig_agent.core.shares import Enforcement
from mig_agent.engine.callers import Caller
from mig_agent.engine.idempotency import digest_of
from mig_agent.frontends.grpc import encode
from mig_agent.frontends.grpc.decode import request_from
from mig_agent.frontends.kubernetes.resources import Naming, resources_of
from mig_agent.frontends.metrics import Metrics
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.engine import ADMIN, Node, engine
from support.shares import FileEnforcer

ALICE = Caller(name="alice", uid=1000)
QUARTER = replace(memory_want("4Gi"), compute_percent=25)


def status_of(node: Node) -> Status:
    """The node as a client reads it."""
    return decode.status(encode.status(node.manager.snapshot, __version__, ADMIN))


async def test_a_share_is_told_with_what_enforces_it_and_what_that_is_worth(tmp_path: Path) -> None:
    enforcer = FileEnforcer(tmp_path / "shares")
    async with engine(tmp_path, "l40s,h100-80gb", enforcers=lambda _driver, _host: (enforcer,)) as node:
        whole = status_of(node)
        assert (whole.gpus[0].is_shared, whole.gpus[1].shared_memory) == (False, None)
        memory = whole.gpus[0].shared_memory
        assert memory is not None
        assert whole.largest_share_mib == memory.largest_mib == memory.usable_mib - memory.overhead_mib
        granted = await node.acquire(QUARTER)
        (device,) = decode.grant(encode.granted(granted)).devices
        assert (device.kind, device.enforced_by, device.compute_percent) == ("share", "mps", 25)
        assert (device.placement, device.memory_mib, device.promise) == (None, 4096, Enforcement.MPS.promise)
        shared = status_of(node)
        assert shared.leases[0].devices == (device,)
        assert shared.gpus[0].is_shared
        account = shared.gpus[0].shared_memory
        assert account == replace(memory, taken_mib=4096 + memory.overhead_mib)
        (share,) = [each for each in shared.gpus[0].instances if each.is_share]
        assert (share.enforced_by, share.compute_percent, share.lease) == ("mps", 25, granted.lease.id)
        models = decode.models(pb.ProfilesResponse(models=encode.models(node.manager.snapshot.view)))
        assert models[0].shared_memory == memory
    async with engine(tmp_path, "", enforcers=lambda _driver, _host: (enforcer,)) as node:
        assert status_of(node).leases[0].devices == (device,), "the ledger has all of it"


async def test_metrics_account_for_shared_memory(tmp_path: Path) -> None:
    enforcer, metrics = FileEnforcer(tmp_path / "shares"), Metrics()
    async with engine(tmp_path, "l40s", enforcers=lambda _driver, _host: (enforcer,)) as node:
        metrics.watch(lambda: node.manager.published)
        for name in ("alice", "bob"):
            await node.acquire("4Gi", name=name)
        gpu, sample = node.gpu(0).uuid, metrics.registry.get_sample_value
        taken = 2 * (4096 + enforcer.overhead_mib) << 20
        assert sample("mig_agent_shared_memory_bytes", {"gpu_uuid": gpu, "state": "shares"}) == taken
        assert sample("mig_agent_shares", {"gpu_uuid": gpu, "enforced_by": "mps"}) == 2
        assert sample("mig_agent_instances", {"gpu_uuid": gpu, "profile": "share", "state": "leased"}) == 2
        slices = [sample("mig_agent_memory_slices", {"gpu_uuid": gpu, "state": each}) for each in ("leased", "free")]
        assert slices == [1, 0]


def test_isolation_and_compute_come_from_the_wire() -> None:
    message = pb.Request(isolation="mig", wants=[pb.Want(memory="4G"), pb.Want(memory="4G", isolation="any")])
    request = request_from(message, ALICE)
    assert [each.isolation for each in request.wants] == [Isolation.MIG, Isolation.ANY]
    (plain,) = request_from(pb.Request(wants=[pb.Want(memory="4G")]), ALICE).wants
    assert (plain.isolation, plain.compute_percent) == (None, None)
    (limited,) = request_from(pb.Request(wants=[pb.Want(gpu_fraction=0.5, compute_percent=25)]), ALICE).wants
    assert limited == Want(fraction=0.5, compute_percent=25, text="0.5 of a GPU")
    with pytest.raises(UsageError, match="cannot take strong as an isolation"):
        request_from(pb.Request(isolation="strong", wants=[pb.Want(memory="4G")]), ALICE)
    with pytest.raises(UsageError, match="from 1 to 100"):
        request_from(pb.Request(wants=[pb.Want(memory="4G", compute_percent=1000)]), ALICE)


def test_another_part_of_compute_is_another_request() -> None:
    def digest(**fields: object) -> str:
        want = pb.Want(memory="4G", **fields)  # type: ignore[arg-type]  # each test gives the right ones
        return digest_of(request_from(pb.Request(request_id="r", wants=[want]), ALICE), ALICE)

    assert digest() == digest()
    assert len({digest(), digest(compute_percent=25), digest(compute_percent=50), digest(isolation="mig")}) == 4


async def test_a_node_that_shares_gpus_shows_kubernetes_what_it_did_before(tmp_path: Path) -> None:
    enforcer = FileEnforcer(tmp_path / "shares")
    async with engine(tmp_path, "l40s,h100-80gb", enforcers=lambda _driver, _host: (enforcer,)) as node:
        view = node.manager.snapshot.view
        assert view.gpus[0].layout.shares is not None
        naming = Naming(whole_gpu="nvidia.com/gpu")
        assert resources_of(view, naming) == resources_of(_unshared(view), naming)
        assert node.manager.count_creatable(memory_want("5G")) == 7, "those of the H100 alone"


def _unshared(view: NodeView) -> NodeView:
    """The same node where GPUs are leased whole only."""
    gpus = tuple(
        replace(gpu, layout=whole_gpu_layout(gpu.layout.model, gpu.layout.memory_mib)) if gpu.layout.shares else gpu
        for gpu in view.gpus
    )
    return replace(view, gpus=gpus)
