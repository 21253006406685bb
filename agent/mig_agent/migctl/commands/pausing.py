"""`migctl pause` and `migctl resume`: have the agent release the driver, and open it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mig_agent.core.requests import parse_reason
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, verb
from mig_agent.migctl.printing import print_json

if TYPE_CHECKING:
    from mig_agent.client.types import Paused


@verb(short_help="Grant nothing more and release the driver.")
@click.option("--reason", metavar="TEXT", default="", help="For people who ask why.")
def pause(common: Common, *, reason: str) -> int:
    """Grant nothing more and release the driver, so that it can be replaced. For administrators.

    Leases stay, what waits stays in the queue, and so does the pause over a restart of the agent.
    """
    output, words = common.wants(), parse_reason(reason)
    with common.client() as client:
        after = client.pause(words)
    return _show(after, output, "paused, and the driver is released" if after.driver_released else "paused")


@verb()
def resume(common: Common) -> int:
    """Take the driver up again after `migctl pause`, and serve. For administrators.

    Where the driver does not answer yet, the agent stays paused, says so, and tries again by itself.
    """
    output = common.wants()
    with common.client() as client:
        after = client.resume()
    return _show(after, output, "still paused" if after.paused else "the agent serves again")


def _show(after: Paused, output: str, done: str) -> int:
    if output == "json":
        from mig_agent.client import to_json  # noqa: PLC0415 -- people who read words need none of it

        print_json(to_json.encode(after))
        return failures.DONE
    reasons = dict.fromkeys((*after.paused, after.message))
    why = "; ".join(each for each in reasons if each)
    print(failures.one_line(f"{done}: {why}" if why else done))
    return failures.DONE
