"""`migctl top`: shows what is used on each instance, live."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from mig_agent.core.quantities import counted, parse_duration
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, verb
from mig_agent.migctl.printing import memory, print_json, table

if TYPE_CHECKING:
    from mig_agent.client import Client
    from mig_agent.client.types import Instance, Status, Usage

UNKNOWN = "?"
"""For what the driver does not report, such as utilisation under MIG; never 0."""
_HEADER = ("GPU", "PROFILE", "STATE", "HOLDER", "USED", "OF", "GPU%", "PROCESSES")
_FIRST_ROWS = 4
"""Number of lines above the first instance."""


@verb()
@click.option("--once", is_flag=True, help="Print it once. Also when stdout is no terminal.")
@click.option("--interval", metavar="TIME", default="2s", show_default=True, help="Between two readings.")
def top(common: Common, *, once: bool, interval: str) -> int:
    """Show the memory used on each instance, live. What the driver does not tell is shown as `?`."""
    output = common.wants()
    seconds = parse_duration(interval)
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        if output == "json":
            print_json(to_json.top(client.status(), client.usage()))
        elif once or not sys.stdout.isatty():
            print(render(client.status(), client.usage()))
        else:
            _live(client, seconds)
    return failures.DONE


def render(node: Status, usage: Mapping[int, Usage]) -> str:
    """Return the page as plain text."""
    unused = {each.id for each in node.leases if each.unused}
    rows = [
        _row(each, gpu.index, usage.get(each.generation), unused=each.lease in unused)
        for gpu in node.gpus
        for each in gpu.instances
    ]
    waiting = f", {len(node.queue)} waiting" if node.queue else ""
    head = failures.one_line(f"{node.node}: {counted(len(node.leases), 'lease')}{waiting}")
    return f"{head}\n\n{table(_HEADER, rows)}" if rows else f"{head}\n\nno instances"


def _row(each: Instance, gpu_index: int, usage: Usage | None, *, unused: bool) -> tuple[str, ...]:
    used = total = percent = None
    pids: tuple[int, ...] | None = None
    if usage is not None:
        used, total, percent, pids = (
            usage.memory_used_mib,
            usage.memory_total_mib,
            usage.utilization_percent,
            usage.processes,
        )
    return (
        str(gpu_index),
        each.profile,
        each.state,
        (each.holder or "-") + (" (unused)" if unused else ""),
        UNKNOWN if used is None else memory(used),
        memory(total or each.memory_mib),
        UNKNOWN if percent is None else str(percent),
        UNKNOWN if pids is None else " ".join(map(str, pids)) or "none",
    )


def _live(client: Client, seconds: float) -> None:
    """Show the page until Ctrl-C. Importing rich takes 60 ms, so it is imported only here."""
    from rich.live import Live  # noqa: PLC0415 -- see above
    from rich.text import Text  # noqa: PLC0415 -- see above

    def page() -> Text:
        height = shutil.get_terminal_size((80, 24)).lines
        lines = render(client.status(), client.usage()).splitlines()
        if len(lines) > height:
            lines = [*lines[: max(height - 1, _FIRST_ROWS)], "..."]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    try:
        with Live(page(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(seconds)
                live.update(page(), refresh=True)
    except KeyboardInterrupt:
        return
