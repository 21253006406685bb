"""`migctl usage`: shows who leased how much, and what of it was used."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import format_duration, shown
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, completer_of, moment, verb
from mig_agent.migctl.printing import local_time, print_json, print_whole, table

if TYPE_CHECKING:
    from mig_agent.client.types import Account, AccountRow

_UNKNOWN = "?"
"""For use that was never measured; never 0."""
_NEARLY_ALL = 0.995
_ROUND = 10
"""From here on one decimal does."""
_HOUR = 3600.0
_MIB_HOURS_IN_GIB_HOUR = 1024 * _HOUR
_CSV = (
    "leases",
    "devices",
    "gib_hours",
    "slice_hours",
    "waited_hours",
    "measured_gib_hours",
    "peak_gib_hours",
)


@verb(short_help="Show who leased how much, and what of it was used.")
@click.option(
    "--since",
    metavar="TIME",
    default="7d",
    show_default=True,
    help="How long ago it begins, or a date: 30d, 2026-01-31.",
)
@click.option("--until", metavar="TIME", help="How long ago it ends, or a date. Default: now.")
@click.option(
    "--by",
    metavar="KEY",
    default="tenant",
    show_default=True,
    shell_complete=completer_of("accounting_key"),
    help="user, tenant, name or profile.",
)
def usage(common: Common, *, since: str, until: str | None, by: str) -> int:
    """Show who leased how much: GiB-hours, slice-hours, the use at peak, and the time from asking to having.

    A lease that is only partly in the time between --since and --until counts by that part. PEAK is what was used of
    what was leased, by the most that was ever in use; `?` where it was never measured. -o also takes csv.
    """
    output = common.wants("csv")
    now = time.time()
    first, last = moment(since, now), None if until is None else moment(until, now)
    if (now if last is None else last) <= first:
        raise UsageError(
            f"cannot count from {shown(since)} to {'now' if until is None else shown(until)}: that is earlier",
            "--since is further back than --until: --since 7d --until 1d",
        )
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC
    from mig_agent.client.api_methods import ACCOUNTING_KEYS  # noqa: PLC0415 -- as above

    key = by.lower()
    if key not in ACCOUNTING_KEYS:
        *others, last_key = ACCOUNTING_KEYS
        known = f"{', '.join(others)} or {last_key}"
        raise UsageError(f"cannot group by {shown(by) or 'an empty text'}", f"--by takes {known}")
    with common.client() as client:
        account = client.account(key, since=first, until=last)
    if output == "json":
        print_json({"by": key, **to_json.account(account)})
    elif output == "csv":
        print_whole(render_csv(account, key))
    else:
        print_whole(render(account, key))
    return failures.DONE


def render(account: Account, by: str) -> str:
    """Return the account as a table with its total."""
    counted = "DEVICES" if by == "profile" else "LEASES"
    header = (by.upper(), counted, "GIB-HOURS", "SLICE-HOURS", "PEAK", "WAITED")
    rows = [_cells(each, each.key or "-", by) for each in account.rows]
    lines = [table(header, [*rows, _cells(account.total, "total", by)])] if rows else ["no leases"]
    if any(_is_partly_measured(each) for each in account.rows):
        lines.append("* of the part whose use was measured")
    if account.is_cut and account.complete_since is not None:
        lines.append(f"The records begin at {local_time(account.complete_since)}; what ended before is not counted.")
    return "\n".join(lines)


def render_csv(account: Account, by: str) -> str:
    """Return the account as comma-separated values, without the total; unknown values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((by, *_CSV))
    for each in account.rows:
        writer.writerow((failures.one_line(each.key), *_numbers(each)))
    return text.getvalue().rstrip("\n")


def _numbers(row: AccountRow) -> Iterator[int | str]:
    yield row.leases
    yield row.devices
    yield f"{row.memory_mib_seconds / _MIB_HOURS_IN_GIB_HOUR:.6f}"
    yield f"{row.slice_seconds / _HOUR:.6f}"
    yield f"{row.waited_seconds / _HOUR:.6f}"
    yield f"{row.measured_mib_seconds / _MIB_HOURS_IN_GIB_HOUR:.6f}"
    yield "" if row.peak_mib_seconds is None else f"{row.peak_mib_seconds / _MIB_HOURS_IN_GIB_HOUR:.6f}"


def _cells(row: AccountRow, key: str, by: str) -> tuple[str, ...]:
    return (
        key,
        str(row.devices if by == "profile" else row.leases),
        _number(row.memory_mib_seconds / _MIB_HOURS_IN_GIB_HOUR),
        _number(row.slice_seconds / _HOUR),
        _peak(row),
        format_duration(row.waited_seconds),
    )


def _number(amount: float) -> str:
    return f"{amount:.1f}" if amount >= _ROUND else f"{amount:.2f}"


def _peak(row: AccountRow) -> str:
    if row.peak_mib_seconds is None or not row.measured_mib_seconds:
        return _UNKNOWN
    share = f"{row.peak_mib_seconds / row.measured_mib_seconds:.0%}"
    return f"{share}*" if _is_partly_measured(row) else share


def _is_partly_measured(row: AccountRow) -> bool:
    return 0 < row.measured_mib_seconds < _NEARLY_ALL * row.memory_mib_seconds
