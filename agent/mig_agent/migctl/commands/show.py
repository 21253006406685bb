"""`migctl show`: shows everything about one lease."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from mig_agent.core.quantities import format_mib
from mig_agent.migctl import failures
from mig_agent.migctl.lease_names import check_name, find_lease
from mig_agent.migctl.options import Common, completer_of, verb
from mig_agent.migctl.printing import ago, device_words, local_time, percent, print_json, print_whole, until

if TYPE_CHECKING:
    from mig_agent.client.types import Device, Instance, LeaseInfo, Status, Usage


@verb()
@click.argument("lease", metavar="LEASE", shell_complete=completer_of("lease"))
def show(common: Common, *, lease: str) -> int:
    """Show everything about one lease.

    LEASE is an id, the beginning of one, or the name that it was requested under.
    """
    output = common.wants()
    check_name(lease)
    from mig_agent.client import Refused, to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        node = client.status()
        name = find_lease(client, lease, node)
        found = next((each for each in node.leases if each.id == name), None)
        if found is None:
            raise Refused(
                reason="unknown-lease",
                message=f"cannot show lease {name}: no lease of {node.node} has this id",
                hint=f"`migctl status --leases` lists them; `migctl events --lease {name}` shows one that has ended",
            )
        usage = client.usage()
    if output == "json":
        print_json(to_json.lease_in_full(found, node, usage))
    else:
        print_whole("\n".join(map(failures.one_line, _lines(found, node, usage))))
    return failures.DONE


def _lines(lease: LeaseInfo, node: Status, usage: dict[int, Usage]) -> Iterator[str]:
    yield f"lease {lease.id}"
    uid = [] if lease.holder_uid is None else [f"uid {lease.holder_uid}"]
    pid = [] if lease.holder_pid is None else [f"process {lease.holder_pid}"]
    yield f"  holder   {', '.join([lease.holder or '-', *uid, *pid])}"
    yield f"  tenant   {lease.tenant or '-'}"
    if lease.request_id:
        yield f"  request  {lease.request_id}"
    yield f"  granted  {local_time(lease.created_at)}, {ago(lease.created_at)} ago"
    if lease.expires_at is not None:
        yield f"  expires  {local_time(lease.expires_at)}, in {until(lease.expires_at)}"
    yield f"  ends     {ending_of(lease)}"
    if lease.warning:
        yield f"  warning  {lease.warning}"
    elif lease.unused:
        yield "  unused   no process has been seen on it for long"
    for number, device in enumerate(lease.devices):
        yield from _device(lease, number, device, node, usage)
    if any(each.is_share for each in lease.devices):
        yield "  variables  those that its command or request got: with CUDA_VISIBLE_DEVICES alone nothing is limited"
    else:
        uuids = ",".join(each.uuid for each in lease.devices if each.uuid)
        yield f"  CUDA_VISIBLE_DEVICES={uuids}"
        yield f"  NVIDIA_VISIBLE_DEVICES={uuids}"
    yield f"  MIG_AGENT_LEASE={lease.id}"


def ending_of(lease: LeaseInfo) -> str:
    """Return what ends a lease, beside an administrator: `when process 4711 ends, or at its deadline`."""
    if lease.pod is not None:
        pod = f"pod {lease.pod.namespace}/{lease.pod.name}"
        return f"with {pod}" if lease.arrived else f"at its deadline, or with {pod} once that is on this node"
    how = [f"when process {lease.pid} ends"] if lease.pid is not None else []
    how += ["with the command or program that holds it"] if lease.hold else []
    how += ["when it is released"] if not how else []
    how += ["at its deadline"] if lease.expires_at is not None else []
    return ", or ".join(how)


def _device(lease: LeaseInfo, number: int, device: Device, node: Status, usage: dict[int, Usage]) -> Iterator[str]:
    kubelet = f" ({lease.kubelet_devices[number]})" if number < len(lease.kubelet_devices) else ""
    if not device.uuid:
        known = f"{device.label} on GPU {device.gpu_index}" if device.profile else "a device"
        yield f"  device   lost: {known}{kubelet}"
        return
    yield f"  device   {device_words(device)}{kubelet}"
    yield f"    uuid       {device.uuid}"
    instance = _instance(node, lease, device)
    reading = usage.get(instance.generation) if instance is not None else None
    pids = None if reading is None else reading.processes
    used = None if reading is None else reading.memory_used_mib
    yield f"    processes  {'unknown' if pids is None else ', '.join(map(str, pids)) or 'none'}"
    yield f"    in use     {'unknown' if used is None else f'{format_mib(used)} of {format_mib(device.memory_mib)}'}"
    yield f"    compute    {_compute(reading)}"


def _compute(reading: Usage | None) -> str:
    if reading is not None and reading.compute is not None:
        each = reading.compute
        return f"{percent(each.sm_percent)} of its multiprocessors busy in the last {each.seconds:.0f}s"
    if reading is not None and reading.utilization_percent is not None:
        return f"a kernel runs on it {reading.utilization_percent}% of the time"
    return "unknown"


def _instance(node: Status, lease: LeaseInfo, device: Device) -> Instance | None:
    found = (each for gpu in node.gpus for each in gpu.instances if each.uuid == device.uuid)
    return next((each for each in found if each.lease == lease.id), None)  # shares have the UUID of their GPU
