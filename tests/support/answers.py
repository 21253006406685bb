"""Parts of an agent's answers as the Python client returns them: a GPU, of which alice has a slice."""

from __future__ import annotations

from mig_agent.client.types import Device, Gpu, Instance, LeaseInfo, MigMode, Placement

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
