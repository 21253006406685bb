"""`migctl events`: shows what happened on the node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import parse_duration
from mig_agent.core.requests import parse_gpu
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, Number, verb
from mig_agent.migctl.printing import local_time, print_json

if TYPE_CHECKING:
    from mig_agent.client.types import Event


@verb()
@click.option("--since", metavar="TIME", default="1d", show_default=True, help="How far back: 30m, 2h, 7d.")
@click.option("--gpu", metavar="GPU", help="Only about this GPU, by index or UUID.")
@click.option("--limit", metavar="N", type=Number("a number of events"), default=1000, help="The newest of them.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on; with -o json a line for each.")
def events(common: Common, *, since: str, gpu: str | None, limit: int, follow: bool) -> int:
    """Show what happened on this node."""
    output = common.wants()
    seconds = parse_duration(since)
    chosen = None if gpu is None else parse_gpu(gpu)
    if limit < 1:
        raise UsageError(f"cannot show {limit} events", "give a number above 0, or leave --limit out")
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        # Read before the past events, so that none falls between.
        revision = client.status().revision if follow else None
        past = client.events(since=time.time() - seconds, gpu=chosen, limit=limit)
        if output == "json" and not follow:
            print_json({"events": [to_json.encode(each) for each in past]})
            return failures.DONE
        for each in past:
            _print(each, output)
        if revision is None:
            return failures.DONE
        for each in client.watch(max([revision, *(one.revision for one in past)])):
            if chosen is None or chosen in {each.gpu, str(each.gpu_index)}:
                _print(each, output)
    return failures.DONE


def _print(event: Event, output: str) -> None:
    if output == "json":
        import json  # noqa: PLC0415 -- a line each, unlike print_json

        from mig_agent.client import to_json  # noqa: PLC0415 -- the client is imported by now

        print(json.dumps(to_json.shown(to_json.encode(event)), ensure_ascii=False), flush=True)
    else:
        print(f"{local_time(event.at)}  {failures.one_line(event.message)}", flush=True)
