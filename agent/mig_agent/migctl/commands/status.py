"""`migctl status`: shows the node as a map and tables, once or live."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown
from mig_agent.core.requests import parse_gpu
from mig_agent.migctl import failures
from mig_agent.migctl.gpu_names import find_gpus
from mig_agent.migctl.options import Common, check_user, completer_of, split, verb
from mig_agent.migctl.printing import can_unicode, print_json, print_whole, wants_color
from mig_agent.migctl.several import NOUN, all_contexts_option, ask, targets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mig_agent.client import Client
    from mig_agent.client.types import Status
    from mig_agent.migctl.several import ContextTarget
    from mig_agent.migctl.status_page import Page

_WIDEST_MAP = 120


@verb(short_help="Show GPUs, what fits now, who holds what, and who waits.")
@click.option("--leases", "all_leases", is_flag=True, help="List every lease, however many there are.")
@click.option("--mine", is_flag=True, help="Only your own leases and requests.")
@click.option("--user", metavar="NAME", help="Only the leases and requests of this user, tenant or pod.")
@click.option(
    "--gpu",
    "gpus",
    metavar="GPU",
    multiple=True,
    shell_complete=completer_of("gpu"),
    help="Only this GPU in full, by index or UUID. Repeatable.",
)
@all_contexts_option
@click.option("--watch", is_flag=True, help="Show it again at each change, until Ctrl-C; with -o json a line for each.")
def status(
    common: Common,
    *,
    all_leases: bool,
    mine: bool,
    user: str | None,
    gpus: tuple[str, ...],
    all_contexts: bool,
    watch: bool,
) -> int:
    """Show the GPUs, what fits on them now, who holds which part, and who waits.

    \b
      migctl status            a line for each GPU; leases if they are few
      migctl status --leases   every lease, with its GPU and slices
      migctl status --mine     what is yours
      migctl status --gpu 2    one GPU in full
      migctl status -o svg     the map as a picture
      migctl status --all-contexts     every machine that you have a context for
    """  # noqa: D301 -- \b is click's mark for a paragraph that keeps its lines
    output = common.wants("svg")
    if watch and output == "svg":
        raise UsageError("cannot show a picture at each change", "leave out --watch, or -o svg")
    check_user(user)
    chosen = tuple(parse_gpu(each) for each in split(gpus))
    several = targets(common, all_contexts=all_contexts)
    if several:
        if watch or gpus or output == "svg":
            what = "watch" if watch else "choose GPUs of" if gpus else "draw"
            raise UsageError(f"cannot {what} several contexts", "give the name of one: --context NAME")

        def select(client: Client) -> Status:
            return _selected(client, client.status(), mine=mine, user=user, gpus=())

        return _show_several(several, select, output, wide=all_leases, filtered=mine or user is not None)
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:

        def look() -> Status:
            return _selected(client, client.status(), mine=mine, user=user, gpus=chosen)

        def page() -> Page:
            return _page(all_leases=all_leases, mine=mine, user=user, gpus=chosen)

        if watch:
            from mig_agent.migctl.watching import watch_node  # noqa: PLC0415 -- only where it is needed

            watch_node(client, look, None if output == "json" else page)
            return failures.DONE
        node = look()
    if output == "json":
        print_json(to_json.encode(node))
        return failures.DONE
    if output == "svg":
        from mig_agent.client.slice_maps import status_svg  # noqa: PLC0415 -- only where it is needed

        print_whole(status_svg(node))
        return failures.DONE
    from mig_agent.migctl.status_page import render  # noqa: PLC0415 -- JSON needs none of it

    print_whole(render(node, page()))
    return failures.DONE


def _show_several(
    chosen: Sequence[ContextTarget], select: Callable[[Client], Status], output: str, *, wide: bool, filtered: bool
) -> int:
    """Show several contexts in one view, as `kubectl mig` does it; only leases and requests where they are filtered."""
    from mig_agent.migctl import nodes_page  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    answers = ask(chosen, select)
    page = nodes_page.tables_page if filtered else nodes_page.status_page
    output = "wide" if wide and output == "text" else output
    return nodes_page.print_page(answers, page, NOUN, output=output, whole=not filtered)


def _page(*, all_leases: bool, mine: bool, user: str | None, gpus: tuple[str, ...]) -> Page:
    from mig_agent.migctl.status_page import Page  # noqa: PLC0415 -- JSON needs none of it

    filtered = mine or user is not None
    return Page(
        width=min(shutil.get_terminal_size((80, 24)).columns, _WIDEST_MAP),
        color=wants_color(),
        unicode=can_unicode(),
        cut=sys.stdout.isatty(),  # in a pipe names are not cut
        boxes=bool(gpus),
        leases=all_leases or filtered or bool(gpus),
        map=bool(gpus) or not filtered,
        nothing=_nothing(user) if filtered else "",
    )


def _nothing(user: str | None) -> str:
    """Return what is said where a filter leaves nothing, so that nobody takes it for an idle node."""
    if user is None:
        return "you hold no lease here, and no request of yours waits"
    return f"no lease is held by {shown(user)}, and no request of that user, tenant or pod waits"


def _selected(client: Client, node: Status, *, mine: bool, user: str | None, gpus: tuple[str, ...]) -> Status:
    """Return the node with what was asked for: GPUs, leases, waiting requests. Raises Refused (`unknown-gpu`)."""
    from mig_agent.migctl.lease_names import (  # noqa: PLC0415 -- after the client is imported
        lease_is_of,
        own_leases,
        own_requests,
        request_is_of,
    )

    leases, queue = node.leases, node.queue
    if mine:
        own = own_leases(client, node)
        leases = tuple(each for each in leases if each in own)
        queue = own_requests(client, node)
    if user is not None:
        leases = tuple(each for each in leases if lease_is_of(each, user))
        queue = tuple(each for each in queue if request_is_of(each, user))
    if not gpus:
        return replace(node, leases=leases, queue=queue)
    chosen = find_gpus(node, gpus)
    indexes_chosen = {each.index for each in chosen}
    leases = tuple(each for each in leases if any(one.gpu_index in indexes_chosen for one in each.devices))
    return replace(node, gpus=chosen, leases=leases, queue=queue)
