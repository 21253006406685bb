"""`migctl context`: names for the agents of several machines, and which one commands ask."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mig_agent.adapters import context_files
from mig_agent.adapters.context_files import TLS_FILES, AgentContext, ContextFile
from mig_agent.core.errors import UsageError
from mig_agent.migctl import contexts, failures
from mig_agent.migctl.options import Common, completer_of, verb
from mig_agent.migctl.printing import print_json, print_whole, table

if TYPE_CHECKING:
    from mig_agent.client.to_json import Json

_NO_OPTIONS = dict.fromkeys(context_files.KEYS, "")


@click.group(invoke_without_command=True)
@click.pass_context
def context(ctx: click.Context) -> None:
    """Name the agents of several machines, and choose one.

    \b
      migctl context add gpu3 --address gpu3.example.com:7400 \\
             --tls-ca ca.crt --tls-cert alice.crt --tls-key alice.key
      migctl --context gpu3 status     one command
      migctl context use gpu3          every command from now on
      migctl status --all-contexts     all in one view

    They are in ~/.config/mig-agent/contexts.yaml, and in /etc/xdg/mig-agent/contexts.yaml for all users of a machine.
    """  # noqa: D301 -- \b is click's mark for a paragraph that keeps its lines
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@verb()
def list(common: Common) -> int:  # noqa: A001 -- the name of the command
    """Show all contexts; the one that commands ask has a star."""
    output = common.wants()
    found = context_files.read_contexts()
    known = [each for _, each in sorted(found.by_name.items())]
    current, said_by = contexts.chosen_name("")
    if output == "json":
        print_json({"contexts": [_encoded(each, current) for each in known], "current": current or None})
        return failures.DONE
    if not known:
        print_whole("no contexts: migctl context add NAME --address HOST:PORT adds one")
        return failures.DONE
    own = context_files.user_file()
    rows = [
        (
            "*" if current and each.name == current else "",
            each.name,
            each.address or "-",
            each.tls_file("tls_cert") or "-",
            each.mistake or ("" if each.file == own else f"in {each.file}"),
        )
        for each in known
    ]
    header = ("", "NAME", "ADDRESS", "CERTIFICATE", "NOTE")
    width = len(header) if any(row[-1] for row in rows) else -1
    print_whole(table(header[:width], [row[:width] for row in rows]))
    if found.current[0]:
        _warn(said_by)
    return failures.DONE


@verb()
@click.argument("name", metavar="NAME", required=False, shell_complete=completer_of("context"))
@click.option("--none", "nothing", is_flag=True, help="Ask this machine's own agent again.")
def use(common: Common, *, name: str | None, nothing: bool) -> int:
    """Have every command from now on ask the agent of this context."""
    common.wants()
    if nothing == (name is not None):
        raise UsageError("cannot tell which context to use", "give NAME, or --none for this machine's own agent")
    address = contexts.endpoint(contexts.find(name), _NO_OPTIONS).address if name else ""
    context_files.change_file(lambda before: replace(before, current=name or ""))
    print_whole(
        f"current context: {name} ({address})" if name else "no context is current: this machine's own agent is"
    )
    _warn(contexts.chosen_name("")[1])
    return failures.DONE


@verb()
@click.argument("name", metavar="NAME")
@click.option("--replace", "again", is_flag=True, help="Change one that you have.")
@click.option("--use", "current", is_flag=True, help="Make it the current one, too.")
def add(common: Common, *, name: str, again: bool, current: bool) -> int:
    """Add a context with these connection options.

    Certificates and keys stay in their files, and have to be readable now.
    """
    common.wants()
    context_files.check_name(name)
    if not common.address:
        raise UsageError(f"cannot add context {name} without --address", "give unix:///path or host:port")
    from mig_agent.client.addresses import parse_address  # noqa: PLC0415 -- a mistyped command line costs no gRPC

    given = parse_address(common.address)
    made = AgentContext(
        name=name,
        file=context_files.user_file() or Path(),
        address=str(given) if given.path is None else f"unix://{given.path.absolute()}",
        tls_server_name=common.tls_server_name,
        tls_ca=_absolute(common.tls_ca),
        tls_cert=_absolute(common.tls_cert),
        tls_key=_absolute(common.tls_key),
    )
    contexts.endpoint(made, _NO_OPTIONS)

    def added(before: ContextFile) -> ContextFile:
        there = before.contexts.get(name)
        if there is not None and not again:
            raise UsageError(f"cannot add context {name}: there is one in {there.place()}", "--replace changes it")
        return replace(before, contexts={**before.contexts, name: made}, current=name if current else before.current)

    context_files.change_file(added)
    print_whole(f"added context {name} ({made.address})" + (", the current one" if current else ""))
    return failures.DONE


@verb()
@click.argument("name", metavar="NAME", shell_complete=completer_of("context"))
def remove(common: Common, *, name: str) -> int:
    """Remove a context from your own file. Certificates and keys stay where they are."""
    common.wants()
    was_current = False

    def removed(before: ContextFile) -> ContextFile:
        nonlocal was_current
        if name not in before.contexts:
            there = contexts.find(name)
            raise UsageError(f"cannot remove context {name}: it is in {there.place()}", "it is not yours to remove")
        was_current = before.current == name
        left = {each: entry for each, entry in before.contexts.items() if each != name}
        return replace(before, contexts=left, current=None if was_current else before.current)

    context_files.change_file(removed)
    print_whole(f"removed context {name}" + ("; it was the current one" if was_current else ""))
    return failures.DONE


for each in (list, use, add, remove):
    context.add_command(each)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _warn(said_by: str) -> None:
    """Say on stderr which variable of the environment comes before the current context."""
    if said_by in {contexts.VARIABLE, contexts.ADDRESS_VARIABLE}:
        words = f"{said_by} is set to {os.environ[said_by]}, and comes before the current context"
        failures.report_message(words, f"unset {said_by}", code=failures.DONE)


def _encoded(each: AgentContext, current: str) -> Json:
    return {
        "context": each.name,
        "current": bool(current) and each.name == current,
        "address": each.address,
        **{key: each.tls_file(key) or None for key in TLS_FILES},
        "tls_server_name": each.tls_server_name or None,
        "file": str(each.file),
        "line": each.lines.get(""),
        "error": each.mistake or None,
    }
