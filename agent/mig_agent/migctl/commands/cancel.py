"""`migctl cancel`: take waiting requests out of the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mig_agent.core.errors import UsageError
from mig_agent.core.requests import parse_reason
from mig_agent.migctl import failures
from mig_agent.migctl.lease_names import check_name, find_request
from mig_agent.migctl.options import Common, check_user, completer_of, verb
from mig_agent.migctl.printing import print_json

if TYPE_CHECKING:
    from mig_agent.client import Client
    from mig_agent.client.types import Waiting


@verb(short_help="Take waiting requests out of the queue.")
@click.argument("requests", metavar="REQUEST...", nargs=-1, shell_complete=completer_of("request"))
@click.option("--mine", is_flag=True, help="All of your waiting requests.")
@click.option("--user", metavar="NAME", help="Whose request it is, where several users have one of that id or name.")
@click.option("--reason", metavar="TEXT", default="", help="For the client that waits.")
def cancel(common: Common, *, requests: tuple[str, ...], mine: bool, user: str | None, reason: str) -> int:
    """Take waiting requests out of the queue: your own or, for administrators, any.

    REQUEST is an id, the beginning of one, or the name that it was made under; `migctl status` shows them. Of several
    your own is meant. The command that waits ends, and says who cancelled it. A lease is ended by `migctl release`.
    """
    output, words = common.wants(), parse_reason(reason)
    check_user(user)
    for each in requests:
        check_name(each, "a waiting request")
    if mine and user is not None:
        raise UsageError("cannot cancel all of yours and those of a user", "give --mine alone, or name the requests")
    if mine and requests:
        raise UsageError("cannot cancel all of yours and only some", "give --mine alone, or name the requests")
    if not mine and not requests:
        raise UsageError("cannot do that without REQUEST", "name the requests, or give --mine for all of yours")
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        cancelled: list[Waiting] = []
        which: list[str | Waiting] = [""] if mine else [*_found(client, requests, user)]
        for chosen in which:
            done = client.cancel(chosen, mine=mine, reason=words)
            cancelled += done
            if output == "text":
                for one in done:
                    print(failures.one_line(f"cancelled {one.request_id}: {one.wants}, of {one.holder}"))
    if output == "json":
        print_json(to_json.cancelled(cancelled))
    elif not cancelled:
        print("no request of yours waits")
    return failures.DONE


def _found(client: Client, requests: tuple[str, ...], user: str | None) -> list[Waiting]:
    """Return the requests that are meant; all are found before the first is cancelled: a mistake cancels none."""
    node = client.status()
    found = [find_request(client, each, node, user) for each in requests]
    return list({(each.caller, each.request_id): each for each in found}.values())
