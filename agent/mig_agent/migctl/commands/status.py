"""`migctl status`: shows the node as a table and a map."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mig_agent.core.quantities import counted, format_duration
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, verb
from mig_agent.migctl.printing import ago, can_unicode, place, print_json, table, until, wants_color

if TYPE_CHECKING:
    from mig_agent.client.types import Gpu, LeaseInfo, LedgerDoubt, Status
    from mig_agent.core.slicemap import SliceMapGpu

_WIDEST_MAP = 120


@verb()
def status(common: Common) -> int:
    """Show the GPUs, who holds which part of them, and who waits."""
    output = common.wants()
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        node = client.status()
    if output == "json":
        print_json(to_json.encode(node))
    else:
        width = min(shutil.get_terminal_size((80, 24)).columns, _WIDEST_MAP)
        # In a pipe names are not cut.
        cut = sys.stdout.isatty()
        print(render(node, width=width, color=wants_color(), unicode=can_unicode(), cut=cut))
    return failures.DONE


def render(node: Status, *, width: int, color: bool, unicode: bool, cut: bool = False) -> str:
    """Return the whole page as plain text. With `cut`, long names are cut so that tables fit the width, too."""
    from mig_agent.core.slicemap import render_legend, render_text  # noqa: PLC0415 -- JSON needs none of it

    waiting = f", {len(node.queue)} waiting" if node.queue else ""
    counts = f"{counted(len(node.gpus), 'GPU')}, {counted(len(node.leases), 'lease')}{waiting}"
    parts = [failures.one_line(f"{node.node}: {counts} (revision {node.revision})")]
    if node.paused:
        parts.append(failures.one_line(f"paused: {'; '.join(node.paused)}"))
    if node.ledger_doubt is not None:
        parts.append("\n".join(map(failures.one_line, _doubt(node.ledger_doubt))))
    parts += [failures.one_line(f"the socket {each}") for each in node.socket_problems]
    parts += [failures.one_line(each) for each in node.problems]
    if node.ledger_error:
        parts.append(failures.one_line(f"no new leases: {node.ledger_error}"))
    pods = {each.id: each.pod.name for each in node.leases if each.pod is not None and each.pod.name}
    parts += [render_text(slice_map(each, pods), width, color=color, unicode=unicode) for each in node.gpus]
    if node.missing_gpus:
        lines = [f"GPU {index} has not answered yet: {why}" for index, why in node.missing_gpus.items()]
        parts.append("\n".join(map(failures.one_line, lines)))
    shown = {each.state for gpu in node.gpus for each in gpu.instances}
    if shown:
        parts.append(render_legend([*shown, "free"], color=color, unicode=unicode))
    notes = [note for each in node.gpus for note in _notes(each)]
    if notes:
        parts.append("\n".join(map(failures.one_line, notes)))
    if node.leases:
        header = ("LEASE", "HOLDER", "DEVICES", "AGE", "ENDS IN")
        parts.append(table(header, [_lease(each) for each in node.leases], width=width if cut else None, bends=(1, 2)))
    if node.queue:
        parts.append(
            table(
                ("PLACE", "HOLDER", "WANTS", "PRIORITY", "WAITS"),
                [
                    (str(each.position), each.holder or "-", each.wants, str(each.priority), ago(each.since))
                    for each in node.queue
                ],
                width=width if cut else None,
                bends=(1, 2),
            )
        )
        if node.reservation_after is not None and not node.strict_fifo:
            after = format_duration(node.reservation_after)
            parts.append(f"from {after} of waiting on, GPUs are kept for the first in the queue")
    return "\n\n".join(parts)


def slice_map(gpu: Gpu, pods: Mapping[str, str]) -> SliceMapGpu:
    """Return a GPU as the input of the map. `pods` are pod names by lease, without namespaces to fit the boxes."""
    from mig_agent.core.slicemap import SliceMapBlock, SliceMapGpu  # noqa: PLC0415 -- JSON needs none of it

    title = f"GPU {gpu.index}: {gpu.model}" + ("" if gpu.state == "ready" else f", {gpu.state}")
    blocks = tuple(
        SliceMapBlock(
            start=each.placement.start if each.placement else 0,
            size=each.placement.size if each.placement else gpu.memory_slices,
            label=each.profile,
            state=each.state,
            holder=pods.get(each.lease, each.holder),
        )
        for each in gpu.instances
    )
    return SliceMapGpu(title=title, memory_slices=gpu.memory_slices, blocks=blocks)


def _notes(gpu: Gpu) -> Iterator[str]:
    """Yield what does not fit into the map."""
    if gpu.reason:
        yield f"GPU {gpu.index} is {gpu.state}: {gpu.reason}"
    if gpu.mig.current != gpu.mig.pending and gpu.state not in {"ready", "whole"}:  # their reason says so
        yield f"GPU {gpu.index}: MIG mode will be {'on' if gpu.mig.pending else 'off'} after a reset"
    for each in gpu.instances:
        if each.state == "blocked" and each.reason:
            yield f"{each.profile} on {place(gpu.index, each.placement)} is blocked: {each.reason}"


def _device(number: int, of: LeaseInfo) -> str:
    """Return one device of a lease; for a lost one, what is still known of it."""
    each = of.devices[number]
    if each.uuid:
        return f"GPU {each.gpu_index} {each.profile}"
    known = [f"GPU {each.gpu_index} {each.profile}"] if each.profile else []
    known += [str(of.kubelet_devices[number])] if number < len(of.kubelet_devices) else []
    return f"lost ({', '.join(known)})" if known else "lost"


def _lease(each: LeaseInfo) -> tuple[str, str, str, str, str]:
    devices = ", ".join(_device(number, each) for number in range(len(each.devices)))
    process = "" if each.holder_pid is None else f", pid {each.holder_pid}"
    marks = f"{' (unused)' if each.unused else ''}{' (on its way)' if each.promised else ''}"
    holder = f"{each.holder or each.tenant or '-'}{process}{marks}"
    return each.id, holder, devices, ago(each.created_at), until(each.expires_at)


def _doubt(doubt: LedgerDoubt) -> Iterator[str]:
    """Yield lines for people, which say what happened to the ledger and what to type next."""
    yield f"the ledger {doubt.why}" + (f"; the former one is kept as {doubt.kept_as}" if doubt.kept_as else "")
    if doubt.restored:
        yield "leases since then are not known: what the ledger does not account for is foreign, and left alone"
    else:
        yield "earlier leases do not count: what the ledger does not account for is foreign, and left alone"
    if doubt.recoverable:
        known = counted(doubt.recoverable, "lease")
        yield f"{known} from before can come back: their holders type `migctl recover` (or `migctl recover LEASE`)"
    yield "when nobody counts on it any more: `migctl adopt UUID ...` or `migctl adopt --all`, as administrator"
