"""The JSON of every kind of answer, key by key and in order, as programs rely on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from mig_agent.client import from_json, to_json, types
from mig_agent.client.to_json import Json
from mig_agent.core.errors import Blocker

GOLDEN: Final[Mapping[str, Json]] = json.loads((Path(__file__).parent / "answers.json").read_text(encoding="utf-8"))

WINDOW = types.Placement(start=2, size=1)
DEVICE = types.Device(
    uuid="MIG-1",
    gpu="GPU-0",
    gpu_index=0,
    profile="1g.10gb",
    memory_mib=9856,
    placement=WINDOW,
    gpu_instance_id=9,
    compute_instance_id=0,
    reused=True,
)
WHOLE = types.Device(
    uuid="",
    gpu="GPU-1",
    gpu_index=1,
    profile="whole",
    memory_mib=81559,
    placement=None,
    gpu_instance_id=None,
    compute_instance_id=None,
    reused=False,
)
LEASE = types.LeaseInfo(
    id="l-1",
    holder="alice",
    tenant="",
    devices=(DEVICE, WHOLE),
    created_at=1.5,
    expires_at=None,
    pid=None,
    hold=True,
    unused=False,
)
OF_POD = types.LeaseInfo(
    id="l-2",
    holder="team-a/train",
    tenant="team-a",
    devices=(),
    created_at=1_700_000_000.0,
    expires_at=1_700_000_060.25,
    pid=12,
    hold=False,
    unused=True,
    holder_uid=1000,
    holder_pid=4711,
    pod=types.Pod(namespace="team-a", name="train"),
    arrived=True,
    kubelet_devices=(types.KubeletDevice(resource="nvidia.com/mig-1g.10gb", id="mig-agent-3"),),
)
LEASED = types.Instance(
    uuid="MIG-1",
    generation=7,
    profile="1g.10gb",
    memory_mib=9856,
    placement=WINDOW,
    gpu_instance_id=9,
    compute_instance_id=0,
    state="leased",
    lease="l-2",
    holder="team-a/train",
    tenant="team-a",
    since=2.0,
    reason="",
    gpu="GPU-0",
    gpu_index=0,
)
FOREIGN = types.Instance(
    uuid="MIG-2",
    generation=8,
    profile="2g.20gb",
    memory_mib=19968,
    placement=None,
    gpu_instance_id=None,
    compute_instance_id=None,
    state="foreign",
    lease="",
    holder="",
    tenant="",
    since=3.0,
    reason="not made by the agent",
    gpu="GPU-0",
    gpu_index=0,
)
GPU = types.Gpu(
    index=0,
    uuid="GPU-0",
    model="NVIDIA H100",
    mig=types.MigMode(capable=True, current=True, pending=False),
    state="ready",
    reason="",
    memory_slices=8,
    memory_mib=81559,
    instances=(LEASED, FOREIGN),
)
WAITING = types.Waiting(
    request_id="r-1",
    holder="bob",
    tenant="b",
    priority=3,
    position=1,
    since=4.0,
    wants="2 x 1g.10gb",
    estimate=types.StartEstimate(earliest=240.0, median=420.5, latest=None, basis="leases", leases=57),
    blockers=(
        Blocker(
            gpu_index=0, what="1g.10gb on slice 4", state="leased", lease="l-1", holder="alice (train)", expires_at=9.0
        ),
    ),
    caller="uid 1001",
    reserved_gpus=(0,),
)
DOUBT = types.LedgerDoubt(since=5.0, why="is damaged", kept_as="/x.damaged-1", restored=False, recoverable=2)
NODE = types.Status(
    node="n1",
    revision=11,
    gpus=(GPU,),
    leases=(LEASE, OF_POD),
    queue=(WAITING,),
    started_at=6.0,
    ledger_error="",
    version="0.1.0",
    driver_version="580",
    strict_fifo=True,
    reservation_after=30.0,
    paused=("by root",),
    missing_gpus={3: "no answer"},
    ledger_doubt=DOUBT,
    socket_problems=("removed",),
    problems=("metrics: off (port 7481 is in use)",),
)
BARE = types.Status(
    node="n2",
    revision=0,
    gpus=(),
    leases=(),
    queue=(),
    started_at=float("inf"),
    ledger_error="disk full",
    version="",
    driver_version="",
    strict_fifo=False,
)
GRANT = types.Grant(
    id="l-1",
    token="t-1",  # noqa: S106 -- of no lease
    devices=(DEVICE,),
    env={"B": "2", "A": "1"},
    expires_at=7.0,
    request_id="r-1",
    notes=("a note",),
    revision=4,
    confirm_by=9.0,
)
PROFILE = types.Profile(
    id=19,
    name="1g.10gb",
    compute_slices=1,
    memory_slices=1,
    memory_mib=9856,
    placements=(WINDOW,),
    attributes=("me",),
)
MODEL = types.GpuModel(model="NVIDIA H100", gpus=(0, 2), memory_slices=8, memory_mib=81559, profiles=(PROFILE,))
STEP = types.Step(
    kind="create", gpu="GPU-0", gpu_index=0, profile="1g.10gb", placement=WINDOW, uuid="", message="create it"
)
PLANNED = types.PlannedDevice(
    gpu="GPU-0", gpu_index=0, profile="1g.10gb", memory_mib=9856, placement=WINDOW, reused=True, uuid="MIG-1"
)
PLAN = types.Plan(
    devices=(PLANNED,),
    steps=(STEP,),
    score=1.5,
    notes=(),
    revision=4,
    explanation=("why",),
    expected_seconds=0.5,
    wasted_mib=1.0,
    capacity_lost=2.0,
    creation_cost=0.25,
)
EVENT = types.Event(
    kind="lease-ended",
    at=8.0,
    revision=5,
    message="it ended",
    gpu="GPU-0",
    gpu_index=0,
    lease="l-1",
    generation=7,
    holder="alice",
    data={"reason": "forced", "n": 1},
)
USAGE = types.Usage(
    generation=7,
    memory_used_mib=1,
    memory_total_mib=2,
    utilization_percent=None,
    processes=(4711, 4712),
    compute=types.ComputeUsage(seconds=2.0, sm_percent=31.5, tensor_percent=0.0, memory_bandwidth_percent=None),
)
ROW = types.AccountRow(
    key="team-a",
    leases=1,
    devices=2,
    memory_mib_seconds=3.0,
    slice_seconds=4.0,
    waited_seconds=5.0,
    measured_mib_seconds=6.0,
    peak_mib_seconds=7.0,
)
UNMEASURED = replace(ROW, key="", measured_mib_seconds=0.0, peak_mib_seconds=None)
ADVICE = types.Advice(
    name="train",
    user="alice",
    verdict="too-few-runs",
    message="train: too few",
    runs=2,
    measured_runs=1,
    asked="20G",
    peak_mib=3000,
    suggestion="",
    replayed=0,
    waited_seconds=None,
    waited_less_seconds=None,
)

ANSWERS: Final = {
    "lease": GRANT,
    "lease of a caller": LEASE,
    "lease of a pod": OF_POD,
    "node": NODE,
    "bare node": BARE,
    "recovered": types.Recovered(lease=LEASE, anew=True, notes=("a note",)),
    "plan": PLAN,
    "bare plan": types.Plan(devices=(), steps=(), score=0.0, notes=("n",), revision=1),
    "event": EVENT,
    "bare event": types.Event(kind="gpu-lost", at=8.0, revision=5, message="lost"),
    "mode": types.ModeChange(gpu="GPU-0", mig=GPU.mig, needs="", message="done"),
    "mode after a reset": types.ModeChange(gpu="GPU-0", mig=GPU.mig, needs="reset", message="reset it"),
    "paused": types.Paused(paused=("by root",), driver_released=True, message=""),
    "gpu": GPU,
    "account": types.Account(rows=(ROW,), total=UNMEASURED, since=None, until=8.0, complete_since=5.0),
    "advice": ADVICE,
}
"""What is an answer as it is; those that are put together are below."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer(name: str) -> None:
    assert_golden(name, to_json.encode(ANSWERS[name]))


def test_answers_that_are_put_together() -> None:
    assert_golden("adopted", to_json.adopted([LEASED, FOREIGN]))
    assert_golden("reclaimed", to_json.reclaimed([LEASED, FOREIGN]))
    assert_golden("profiles", to_json.profiles([MODEL]))
    assert_golden("top", to_json.top(NODE, {7: USAGE}))
    blockers = [
        Blocker(gpu_index=0, what="1g.10gb", state="leased", lease="l-1", holder="alice"),
        Blocker(gpu_index=1, what="it", state="lost"),
    ]
    assert_golden("failure", to_json.failure(reason="no-capacity", message="cannot", retryable=True, blockers=blockers))
    changed = to_json.failure(reason="revision-changed", message="cannot", explanation=["x"], revision=3, changed=["y"])
    assert_golden("failure by revision", changed)
    waiting = to_json.failure(reason="no-capacity", message="cannot", estimate=WAITING.estimate)
    assert isinstance(waiting, dict)
    error = waiting["error"]
    assert isinstance(error, dict)
    assert error["estimate"] == to_json.encode(WAITING.estimate)


def assert_golden(name: str, found: Json) -> None:
    """The comparison is by text, since programs may rely on the order of keys."""
    assert json.dumps(found) == json.dumps(GOLDEN[name])


def test_a_status_can_be_read_back() -> None:
    assert to_json.encode(from_json.status(GOLDEN["node"])) == GOLDEN["node"]


def test_a_status_of_another_version_can_be_read() -> None:
    found = from_json.status({"node": "n", "gpus": [{"index": 3, "new": {}}], "leases": None, "newer": [1]})
    assert (found.node, found.gpus[0].index, found.gpus[0].model, found.leases) == ("n", 3, "", ())
    with pytest.raises(ValueError, match="cannot decode a node"):
        from_json.status({"error": {}})
