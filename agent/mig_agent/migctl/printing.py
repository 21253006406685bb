"""Prints what the verbs return: JSON, tables in plain text, and sizes and times for people."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import format_duration, format_mib
from mig_agent.core.texts import state_and_reason
from mig_agent.migctl.failures import one_line

if TYPE_CHECKING:
    from mig_agent.client.to_json import Json
    from mig_agent.client.types import Device, Gpu, Placement, PlannedDevice

_MAP_CHARACTERS = "\u2588\u2591\u2592\u2573\u250c\u2026"


def print_json(value: Json) -> None:
    """Print one document on stdout, indented for a terminal."""
    from mig_agent.client.to_json import shown  # noqa: PLC0415 -- who prints JSON has imported it

    print_whole(json.dumps(shown(value), indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def print_whole(text: str) -> None:
    """Print lines in one write: a reader that closes the pipe after the first one, such as `head -1`, gets all of them.

    Printed in several pieces, the later ones may fail for a reader that has read enough.
    """
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def check_stdout() -> None:
    """Raise UsageError if this program was started without stdout, so that nothing it prints could be read."""
    if sys.__stdout__ is None:  # though sys.stdout may be another file by now, which leads nowhere
        raise UsageError(
            "cannot tell anybody of the lease: stdout is closed", "send it to a file, or to /dev/null where you must"
        )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    bends: Sequence[int] = (),
    drops: Sequence[str] = (),
) -> str:
    """Return the rows in columns as wide as they need to be; the last one has no padding.

    If that is more than `width` characters, the columns in `drops`, by name, are left out one after the other until it
    fits; then the columns in `bends` are cut, the widest first. Otherwise none is.
    """
    dropped = next((name for name in drops if name in header), None)
    if width is not None and dropped is not None and max(map(len, table(header, rows).splitlines())) > width:
        gone = list(header).index(dropped)
        kept = [column for column in range(len(header)) if column != gone]
        return table(
            [header[column] for column in kept],
            [[row[column] for column in kept] for row in rows],
            width=width,
            bends=[column - (column > gone) for column in bends if column != gone],
            drops=drops,
        )
    lines = [list(header), *(list(map(one_line, row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    excess = sum(widths) + 2 * (len(widths) - 1) - width if width is not None and bends else 0
    for _ in range(max(0, excess)):
        widest = max(bends, key=lambda column: widths[column])
        widths[widest] = max(len(header[widest]), widths[widest] - 1)
    return "\n".join(
        "  ".join(_fitted(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _fitted(cell: str, width: int) -> str:
    return cell.ljust(width) if len(cell) <= width else cell[: width - 2] + ".."


def percent(value: float) -> str:
    """Return a percentage without decimals; `<1%` for a little, which is not nothing."""
    return "<1%" if 0 < value < 0.5 else f"{value:.0f}%"  # noqa: PLR2004 -- what would be rounded to 0


def slices(placement: Placement | None) -> str:
    """Return `slices 0-1` or `slice 4`; empty for a whole GPU."""
    if placement is None:
        return ""
    if placement.size == 1:
        return f"slice {placement.start}"
    return f"slices {placement.start}-{placement.start + placement.size - 1}"


def place(gpu_index: int, placement: Placement | None) -> str:
    """Return `GPU 1, slices 0-1`, or `GPU 1` for a whole one."""
    return f"GPU {gpu_index}" if placement is None else f"GPU {gpu_index}, {slices(placement)}"


def device_words(device: Device | PlannedDevice) -> str:
    """Return a device for people: `1g.10gb (9.75 GiB) on GPU 1, slices 0-1`, or a share with what it promises."""
    where = place(device.gpu_index, device.placement)
    if not device.is_share:
        name = "whole GPU" if device.profile == "whole" else device.profile
        return f"{name} ({format_mib(device.memory_mib)}) on {where}"
    compute = "" if device.compute_percent is None else f" and {device.compute_percent}% of the multiprocessors"
    share = f"share of {format_mib(device.memory_mib)}{compute} on {where}"
    return ", ".join(filter(None, (share, device.promise)))


def gpu_state(gpu: Gpu) -> str:
    """Return the state of a GPU and why: `GPU 3 is cordoned by root: the fan is loud`."""
    if gpu.state == "whole":
        if gpu.is_shared:
            how = "is shared"
        elif any(each.state == "leased" for each in gpu.instances):
            how = "is leased whole"
        else:
            how = "can be leased whole or shared" if gpu.shared_memory else "can be leased whole"
        return f"GPU {gpu.index} {how}" + (f": {gpu.reason}" if gpu.reason else "")
    return f"GPU {gpu.index} is {state_and_reason(gpu.state, gpu.reason)}"


def ago(moment: float, now: float | None = None) -> str:
    """Return how long ago a moment was: `5m`."""
    return format_duration((time.time() if now is None else now) - moment)


def until(moment: float | None) -> str:
    """Return how long it is until a moment: `2h`; `-` for never, `now` if it has passed."""
    if moment is None:
        return "-"
    left = moment - time.time()
    # To the nearest second: 2h, printed a moment after the request, is 2h and not 1h59m.
    return format_duration(max(left + 0.5, 1)) if left > 0 else "now"


def local_time(moment: float) -> str:
    """Return seconds since the epoch in this machine's time zone: `2025-11-21 12:00:05`."""
    try:
        return datetime.fromtimestamp(moment, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "?"


def wants_color() -> bool:
    """Return True if stdout is a terminal that understands colours, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in {"", "dumb"}


def can_unicode() -> bool:
    """Return True if stdout's encoding has the characters of the map."""
    try:
        _MAP_CHARACTERS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
