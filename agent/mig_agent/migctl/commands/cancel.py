"""`migctl cancel`: take waiting requests out of the queue."""

from __future__ import annotations

import click

from mig_agent.core.errors import UsageError
from mig_agent.core.requests import parse_reason
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, verb
from mig_agent.migctl.printing import print_json


@verb()
@click.argument("request", metavar="[REQUEST]", required=False)
@click.option("--mine", is_flag=True, help="All of your waiting requests.")
@click.option("--reason", metavar="TEXT", default="", help="For the client that waits.")
def cancel(common: Common, *, request: str | None, mine: bool, reason: str) -> int:
    """Take a waiting request out of the queue: one of yours or, for administrators, any.

    REQUEST is its id, or a beginning that only one has; `migctl status -o json` shows the ids of yours. The command
    that waits ends, and says who cancelled it. A lease is ended by `migctl release`.
    """
    output, words = common.wants(), parse_reason(reason)
    if mine and request:
        raise UsageError("cannot cancel one request and all of yours", "give its id, or --mine")
    if not mine and not request:
        raise UsageError("cannot cancel a request without its id", "give its id, or --mine for all of yours")
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        cancelled = client.cancel(request or "", mine=mine, reason=words)
    if output == "json":
        print_json(to_json.cancelled(cancelled))
        return failures.DONE
    for each in cancelled:
        print(failures.one_line(f"cancelled {each.request_id}: {each.wants}, of {each.holder}"))
    if not cancelled:
        print("no request of yours waits")
    return failures.DONE
