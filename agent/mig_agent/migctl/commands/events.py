"""`migctl events`: shows what happened on the node."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown
from mig_agent.core.requests import parse_gpu
from mig_agent.migctl import failures
from mig_agent.migctl.gpu_names import find_gpus
from mig_agent.migctl.options import Common, completer_of, moment, verb
from mig_agent.migctl.printing import local_time, print_json

if TYPE_CHECKING:
    from mig_agent.client import Client
    from mig_agent.client.types import Event, EventPage

_MOST = 1000
"""Number of events that are shown where no limit is given."""
_BEFORE_FOLLOWING = 10
_ALL = 2**32 - 1
_LONGEST_LIMIT = 9
_DAY = "1d"


@verb()
@click.option("--since", metavar="TIME", help=f"How far back, or a date: 30m, 7d, 2026-01-31. Default: {_DAY}.")
@click.option("--gpu", metavar="GPU", shell_complete=completer_of("gpu"), help="Only about this GPU, by index or UUID.")
@click.option(
    "--lease",
    metavar="LEASE",
    shell_complete=completer_of("lease"),
    help="Only about this lease, by id or name: an active one, else the latest that has ended.",
)
@click.option(
    "--limit",
    metavar="N",
    help=f"The newest of them: a number, or all. Default: {_MOST}, and with -f alone the last 10.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on; with -o json a line for each.")
def events(
    common: Common, *, since: str | None, gpu: str | None, lease: str | None, limit: str | None, follow: bool
) -> int:
    """Show what happened on this node, the oldest first.

    The agent keeps the newest 10,000 events. Where some that match are left out, stderr says how many.
    """
    output = common.wants()
    now = time.time()
    first = moment(_DAY if since is None else since, now)
    if first > now:
        raise UsageError(f"cannot look back to {shown(since or '')}: that is in the future", "give an earlier date")
    chosen = None if gpu is None else parse_gpu(gpu)
    only_last = follow and since is None and limit is None
    most = _BEFORE_FOLLOWING if only_last else _limit(limit)
    if lease is not None:
        from mig_agent.migctl.lease_names import check_name  # noqa: PLC0415 -- only where it is needed

        check_name(lease)
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        named, lease = lease, None if lease is None else _active_or_named(client, lease)
        # Read before the past events, so that none falls between.
        revision = client.status().revision if follow else None
        page = client.event_page(since=first, gpu=chosen, limit=most, lease=lease or "")
        _check_gpu(client, chosen, page)
        lease = page.events[-1].lease if lease is not None and page.events else lease
        _say_which_lease(lease, named, page)
        if not only_last:
            _say_what_is_left_out(page)
        if output == "json" and not follow:
            print_json(to_json.events(page))
            return failures.DONE
        for each in page.events:
            _print(each, output)
        if revision is None:
            return failures.DONE
        for each in client.watch(max([revision, *(one.revision for one in page.events)])):
            if chosen in {None, each.gpu, str(each.gpu_index)} and lease in {None, each.lease}:
                _print(each, output)
    return failures.DONE


def _limit(text: str | None) -> int:
    """Return the most events to show. Raises UsageError."""
    if text is None or text == "0":
        return _MOST
    if text == "all":
        return _ALL
    if not text.isdecimal() or len(text) > _LONGEST_LIMIT:
        large = ": it is too large" if text.isdecimal() else ""
        raise UsageError(
            f"cannot take {shown(text) or 'an empty text'} as a number of events{large}", "write a number, or all"
        )
    return int(text)


def _say_what_is_left_out(page: EventPage) -> None:
    if page.earlier:
        number, total = len(page.events), len(page.events) + page.earlier
        last = "last" if number == 1 else f"last {number}"
        words = f"migctl: showing the {last} of {total} events; --limit {total} or --limit all shows the others"
        print(words, file=sys.stderr, flush=True)


def _active_or_named(client: Client, lease: str) -> str:
    from mig_agent.migctl.lease_names import find_any_lease  # noqa: PLC0415 -- only where it is needed

    return find_any_lease(client, lease)


def _say_which_lease(lease: str | None, named: str | None, page: EventPage) -> None:
    """Report which lease was taken for a name, and one without events in this time: that no output is no mistake."""
    if lease is None or named is None:
        return
    words = ""
    if not page.events:
        words = f"nothing is remembered of lease {lease} in this time; --since 30d looks further back"
    elif not lease.startswith(named):
        words = f"{named} is lease {lease}"
    if words:
        print(f"migctl: {failures.one_line(words)}", file=sys.stderr, flush=True)


def _print(event: Event, output: str) -> None:
    if output == "json":
        import json  # noqa: PLC0415 -- a line each, unlike print_json

        from mig_agent.client import to_json  # noqa: PLC0415 -- the client is imported by now

        print(json.dumps(to_json.shown(to_json.encode(event)), ensure_ascii=False), flush=True)
    else:
        print(f"{local_time(event.at)}  {failures.one_line(event.message)}", flush=True)


def _check_gpu(client: Client, gpu: str | None, page: EventPage) -> None:
    """Raise Refused for a GPU that is not there, unless there are events of it: it may be gone."""
    if gpu is not None and not page.events:
        find_gpus(client.status(), (gpu,))
