"""Parts of an agent's answers as the Python client returns them: a GPU of which alice has a slice, and bob a share."""

from __future__ import annotations

from dataclasses import replace

from mig_agent.client.types import Device, Gpu, Instance, LeaseInfo, MigMode, Placement, SharedMemory

LEASED = Instance(
    uuid="MIG-1",
    generation=1,
    profile="1g.10gb",
    memory_mib=9984,
    placement=Placement(0, 1),
    gpu_instance_id=7,
    compute_instance_id=0,
    state="leased",
    lease="l1",
    holder="alice",
    tenant="team-a",
    since=0.0,
    reason="",
    gpu="GPU-1",
    gpu_index=0,
)
GPU = Gpu(
    index=0,
    uuid="GPU-1",
    model="NVIDIA H100 80GB HBM3",
    mig=MigMode(capable=True, current=True, pending=True),
    state="ready",
    reason="",
    memory_slices=8,
    memory_mib=81559,
    instances=(LEASED,),
)
DEVICE = Device(
    uuid="MIG-1",
    gpu="GPU-1",
    gpu_index=0,
    profile="1g.10gb",
    memory_mib=9984,
    placement=Placement(0, 1),
    gpu_instance_id=7,
    compute_instance_id=0,
    reused=False,
)
LEASE = LeaseInfo(
    id="l1",
    holder="alice",
    tenant="team-a",
    devices=(DEVICE,),
    created_at=0.0,
    expires_at=None,
    pid=None,
    hold=False,
    unused=True,
)

SHARE = Instance(
    uuid="GPU-2",
    generation=4,
    profile="share.4096m",
    memory_mib=4096,
    placement=None,
    gpu_instance_id=None,
    compute_instance_id=None,
    state="leased",
    lease="l2",
    holder="bob",
    tenant="team-b",
    since=0.0,
    reason="",
    gpu="GPU-2",
    gpu_index=1,
    kind="share",
    enforced_by="mps",
    compute_percent=25,
)
SHARED_MEMORY = SharedMemory(
    enforced_by="mps",
    usable_mib=44_000,
    taken_mib=4_224,
    others_mib=0,
    overhead_mib=128,
    least_mib=1_024,
    promise="enforced by MPS: each process is limited, not faults or bandwidth",
    without_process="mps",
)
SHARED_GPU = Gpu(
    index=1,
    uuid="GPU-2",
    model="NVIDIA L40S",
    mig=MigMode(capable=False, current=False, pending=False),
    state="whole",
    reason="it has no MIG mode",
    memory_slices=1,
    memory_mib=46_068,
    instances=(
        replace(
            SHARE,
            generation=1,
            profile="whole",
            memory_mib=46_068,
            state="idle",
            lease="",
            holder="",
            tenant="",
            kind="whole",
            enforced_by="",
            compute_percent=None,
        ),
        SHARE,
    ),
    shared_memory=SHARED_MEMORY,
)
SHARE_DEVICE = Device(
    uuid="GPU-2",
    gpu="GPU-2",
    gpu_index=1,
    profile="share.4096m",
    memory_mib=4096,
    placement=None,
    gpu_instance_id=None,
    compute_instance_id=None,
    reused=False,
    kind="share",
    enforced_by="mps",
    promise=SHARED_MEMORY.promise,
    compute_percent=25,
)
SHARE_LEASE = replace(LEASE, id="l2", holder="bob", tenant="team-b", devices=(SHARE_DEVICE,), unused=False)
