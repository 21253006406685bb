"""Chooses the context of a command: by name, from the environment, or the current one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mig_agent.adapters import context_files
from mig_agent.adapters.context_files import TLS_FILES, AgentContext
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown
from mig_agent.migctl import failures

if TYPE_CHECKING:
    from mig_agent.client import Tls

VARIABLE = "MIG_AGENT_CONTEXT"
ADDRESS_VARIABLE = "MIG_AGENT_ADDRESS"
"""Also in `client.addresses`, whose import is that of gRPC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of an agent, and the certificates for it."""

    address: str | None
    """None for the default of the client."""
    tls: Tls | None


def chosen_name(given: str, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the name of the context of a command, and what says so; empty names where none applies.

    `given` is the option's; it wins over MIG_AGENT_ADDRESS, that over MIG_AGENT_CONTEXT, and that over the current
    context. Raises UsageError for files that cannot be read.
    """
    if given:
        return given, "--context"
    if environment.get(ADDRESS_VARIABLE):
        return "", ADDRESS_VARIABLE
    if environment.get(VARIABLE):
        return environment[VARIABLE], VARIABLE
    return context_files.read_contexts(environment).current


def find(name: str, said_by: str = "") -> AgentContext:
    """Return the context of this name, which may have a mistake. Raises UsageError if there is none.

    `said_by` is what names it, where that is no option of this command line.
    """
    known = context_files.read_contexts().by_name
    if name not in known:
        near = failures.near_guess(name, known)
        where = f" ({said_by})" if said_by and said_by != "--context" else ""
        hint = f"did you mean {near}?" if near else "`migctl context list` shows them; `migctl context add` adds one"
        raise UsageError(f"cannot find context {shown(name)}{where}", hint)
    return known[name]


def endpoint_of(options: Mapping[str, str]) -> Endpoint:
    """Return where the agent of a command is: by its options, else the context, else the environment.

    Raises UsageError.
    """
    given = options["context"]
    name, said_by = ("", "") if options["address"] and not given else chosen_name(given)
    if "," in name:
        raise UsageError(
            f"cannot do that with several contexts ({shown(name)})", "`status` and `top` show several at once"
        )
    return endpoint(find(name, said_by) if name else None, options)


def chosen_contexts(options: Mapping[str, str], *, all_contexts: bool) -> tuple[AgentContext, ...]:
    """Return the contexts to show in one view; none where only one agent is meant. Raises UsageError."""
    given = options["context"]
    names = "" if options["address"] and not given else chosen_name(given)[0]
    if not all_contexts and "," not in names:
        return ()
    if options["address"] or (all_contexts and given):
        raise UsageError("cannot show several contexts and one agent", "leave out --address, or --all-contexts")
    return every_context() if all_contexts else tuple(map(find, split_names(names)))


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in `gpu1,gpu2`, each once. Raises UsageError for an empty one."""
    names = tuple(dict.fromkeys(each.strip() for each in text.split(",")))
    if "" in names:
        raise UsageError(f"cannot take {shown(text)} as contexts: a name is empty", "write gpu1,gpu2")
    return names


def every_context() -> tuple[AgentContext, ...]:
    """Return all contexts, by name, those with mistakes too. Raises UsageError if there are none."""
    known = context_files.read_contexts().by_name
    if not known:
        raise UsageError(
            "cannot show all contexts: there are none", "migctl context add NAME --address HOST:PORT adds one"
        )
    return tuple(known[name] for name in sorted(known))


def endpoint(context: AgentContext | None, options: Mapping[str, str]) -> Endpoint:
    """Return where to connect: what `options` give by the names of a context's keys, else what the context has.

    What neither gives comes from the environment. Raises UsageError, for what a context has with its file and line.
    """
    from mig_agent.client import Tls  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC
    from mig_agent.client.addresses import parse_address  # noqa: PLC0415 -- as above

    address, server_name = options["address"], options["tls_server_name"]
    files = {each: options[each] for each in TLS_FILES}
    if context is not None:
        if context.mistake:
            raise UsageError(context.mistake, context.hint)
        if not address:
            address = context.address
            try:
                parse_address(address)
            except UsageError as error:
                where = f"context {context.name}, {context.place('address')}"
                raise UsageError(f"{error.message} ({where})", error.hint) from error
        for key in TLS_FILES:
            files[key] = files[key] or _readable(context, key)
        server_name = server_name or context.tls_server_name
        missing = [each for each in TLS_FILES if not files[each]]
        if 0 < len(missing) < len(TLS_FILES):
            where = f"context {context.name}, {context.place()}"
            raise UsageError(f"cannot use TLS without {' and '.join(missing)} ({where})", "it takes all three files")
    tls = Tls.of(ca=files["tls_ca"], cert=files["tls_cert"], key=files["tls_key"]) or Tls.from_environment()
    if tls is not None and server_name:
        tls = replace(tls, server_name=server_name)
    return Endpoint(address=address or None, tls=tls)


def _readable(context: AgentContext, key: str) -> str:
    """Return the path of a file that a context names; empty if it names none. Raises UsageError."""
    path = context.tls_file(key)
    if path:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            raise UsageError(
                f"cannot read {path}: {error.strerror} ({key} of context {context.name}, {context.place(key)})",
                "name a file that you may read",
            ) from error
    return path
