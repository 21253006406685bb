"""Asks the agents of several contexts at once, and shows their answers in one view, as `kubectl mig` does of nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from mig_agent.core.errors import UsageError
from mig_agent.migctl import contexts
from mig_agent.migctl.answers import Answer, Found, ask_all
from mig_agent.migctl.contexts import Endpoint

if TYPE_CHECKING:
    from mig_agent.adapters.context_files import AgentContext
    from mig_agent.client import Client
    from mig_agent.client.to_json import Json
    from mig_agent.migctl.options import Common

NOUN = "context"
ANSWER_SECONDS = 5.0
"""Time limit of each answer."""
all_contexts_option = click.option(
    "--all-contexts", is_flag=True, help="Of all your contexts in one view; of some with --context NAME,NAME."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextTarget:
    """A context whose agent can be asked, or a mistake in it."""

    label: str
    address: str
    endpoint: Endpoint
    trouble: str = ""
    """Why it cannot be asked: a mistake in its file."""

    @property
    def keys(self) -> Mapping[str, Json]:
        """Return its keys in JSON."""
        return {NOUN: self.label, "address": self.address}


def targets(common: Common, *, all_contexts: bool) -> tuple[ContextTarget, ...]:
    """Return the contexts of a command that shows several; none where only one agent is meant. Raises UsageError.

    A mistake in one context is its own trouble, and holds up no other.
    """
    options = asdict(common)
    chosen = contexts.chosen_contexts(options, all_contexts=all_contexts)
    if chosen:  # and gRPC is not imported yet, whose own lines would come in between, and into a live view
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return tuple(_target(each, options) for each in chosen)


def _target(context: AgentContext, options: Mapping[str, str]) -> ContextTarget:
    endpoint, trouble = Endpoint(address=None, tls=None), ""
    try:
        endpoint = contexts.endpoint(context, options)
    except UsageError as error:
        trouble = error.message
    return ContextTarget(label=context.name, address=context.address, endpoint=endpoint, trouble=trouble)


def ask(
    chosen: Sequence[ContextTarget], question: Callable[[Client], Found], seconds: float = ANSWER_SECONDS
) -> tuple[Answer[Found], ...]:
    """Return the answer of each context's agent to a question that changes nothing; `seconds` is each one's limit."""
    from mig_agent.client import Client  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    def asked(target: ContextTarget) -> Found:
        with Client(target.endpoint.address, tls=target.endpoint.tls, patience=0.0) as client:
            return question(client)

    return ask_all(chosen, asked, seconds)
