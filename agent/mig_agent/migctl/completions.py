"""Completes words for a shell: leases, profiles and GPUs by asking the agent for a moment, commands and files.

A person who presses Tab must never wait: where the agent does not answer within a second, nothing is offered.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from click.shell_completion import CompletionItem

from mig_agent.core.errors import MigAgentError
from mig_agent.migctl.options import Common

if TYPE_CHECKING:
    from mig_agent.client import Client

_Found = TypeVar("_Found")
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_DEADLINE_SECONDS = 1.0
_MOST_COMMANDS = 200
_FILES = CompletionItem("", type="file")
"""Has the shell complete the names of files itself."""


def complete_mode(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete what `migctl mode` switches to."""
    return [CompletionItem(each) for each in ("enable", "disable") if each.startswith(incomplete)]


def complete_topic(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete what `migctl help` knows."""
    root = context.find_root()
    commands = root.command.list_commands(root) if isinstance(root.command, click.Group) else []
    return [CompletionItem(each) for each in (*commands, "connection") if each.startswith(incomplete)]


def complete_context(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a context, of several the last."""
    from mig_agent.adapters.context_files import read_contexts  # noqa: PLC0415 -- only where it is needed

    before, comma, last = incomplete.rpartition(",")
    try:
        known = [each for each in read_contexts().by_name.values() if not each.mistake]
    except MigAgentError:
        return []
    return [
        CompletionItem(f"{before}{comma}{each.name}", help=each.address) for each in known if each.name.startswith(last)
    ]


def complete_shell(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a shell."""
    return [CompletionItem(each) for each in ("bash", "zsh", "fish") if each.startswith(incomplete)]


def complete_output(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the format of the output."""
    more = {"request": ("env",), "status": ("svg",), "usage": ("csv",)}
    formats = ("text", "json", *more.get(context.info_name or "", ()))
    return [CompletionItem(each) for each in formats if each.startswith(incomplete)]


def complete_accounting_key(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete what `migctl usage` groups by."""
    from mig_agent.client.api_methods import ACCOUNTING_KEYS  # noqa: PLC0415 -- only where it is needed

    return [CompletionItem(each) for each in ACCOUNTING_KEYS if each.startswith(incomplete)]


def complete_file(_context: click.Context, _parameter: click.Parameter, _incomplete: str) -> list[CompletionItem]:
    """Have the shell complete the name of a file."""
    return [_FILES]


def complete_command(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a command of PATH and then its arguments, which are taken for files."""
    if context.params.get(parameter.name or "") or "/" in incomplete or not incomplete:
        return [_FILES]
    names = sorted(set(_programs(incomplete)))[:_MOST_COMMANDS]
    return [CompletionItem(each) for each in names] or [_FILES]


def complete_lease(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the id or name of any lease."""
    return _leases(context, incomplete, own=False)


def complete_own_lease(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the id or name of a lease of this person; of any lease where there is none."""
    return _leases(context, incomplete, own=True)


def complete_request(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the id or name of a waiting request that this person may cancel; a whole id once it is begun."""
    from mig_agent.migctl import lease_names  # noqa: PLC0415 -- only where it is needed

    queue = [each for each in _ask(context, lambda client: client.status().queue) or () if each.request_id]
    short = lease_names.short_ids([each.request_id for each in queue])
    found: dict[str, str] = {}
    words = []
    for each in queue:
        begun = incomplete and each.request_id.startswith(incomplete)
        words.append((each.request_id if begun else short[each.request_id], *lease_names.request_names(each)))
    for each, own in zip(queue, words, strict=True):
        found |= dict.fromkeys(_offered(own, words, incomplete), f"{each.holder}: {each.wants}")
    return [CompletionItem(name, help=about) for name, about in found.items() if name.startswith(incomplete)]


def complete_isolation(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the level of isolation."""
    return [CompletionItem(each) for each in ("any", "mig") if each.startswith(incomplete)]


def complete_gpu(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the index of a GPU."""
    gpus = _ask(context, lambda client: client.status().gpus) or ()
    return [CompletionItem(str(each.index), help=each.model) for each in gpus if str(each.index).startswith(incomplete)]


def complete_gpu_model(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a part of the name of a GPU model that has no blank: `h100`, `a100-sxm4-40gb`."""
    gpus = _ask(context, lambda client: client.status().gpus) or ()
    names = {each.model.removeprefix("NVIDIA ").partition(" ")[0].lower(): each.model for each in gpus}
    return [CompletionItem(name, help=model) for name, model in names.items() if name.startswith(incomplete.lower())]


def complete_profile(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a profile that the GPUs offer."""
    models = _ask(context, lambda client: client.profiles()) or ()
    names = dict.fromkeys(each.name for model in models for each in model.profiles if each.name != "whole")
    return [CompletionItem(each) for each in names if each.startswith(incomplete)]


def _offered(own: Sequence[str], everything: Iterable[Sequence[str]], incomplete: str) -> Sequence[str]:
    """Return the words to offer for one of several things that are called by id, the first word, or by a name.

    All of them once a word is begun; before that one alone, so that a single thing is completed at once: a name that
    only it has, which people know better than the id, else the id.
    """
    words = [own[0], *(name for name in own[1:] if " " not in name)]  # a blank would end the word
    if incomplete:
        return words
    unique = (name for name in words[1:] if sum(name in each for each in everything) == 1)
    return [next(unique, words[0])]


def _leases(context: click.Context, incomplete: str, *, own: bool) -> list[CompletionItem]:
    from mig_agent.migctl import lease_names  # noqa: PLC0415 -- only where it is needed

    def ask(client: Client) -> Iterable[tuple[str, str]]:
        node = client.status()
        chosen = (lease_names.own_leases(client, node) or node.leases) if own else node.leases
        words = {each.id: (each.id, *lease_names.names_of(each)) for each in chosen}
        for each in chosen:
            about = lease_names.describe(each).partition(" of ")[2]
            yield from ((word, about) for word in _offered(words[each.id], words.values(), incomplete))

    found = dict(_ask(context, lambda client: tuple(ask(client))) or ())
    return [CompletionItem(name, help=about) for name, about in found.items() if name.startswith(incomplete)]


def _ask(context: click.Context, ask: Callable[[Client], _Found]) -> _Found | None:
    """Return the agent's answer; None if it gives none. Ends this process if it takes too long."""
    given: dict[str, str | None] = {}
    for each in (context.find_root(), context):
        given |= {name: each.params[name] for name in Common.__dataclass_fields__ if each.params.get(name)}
    late = threading.Timer(_DEADLINE_SECONDS, lambda: os._exit(0))
    late.daemon = True
    late.start()
    try:
        with Common.of(given).client(patience=0) as client:
            return ask(client)
    except MigAgentError:
        return None
    finally:
        late.cancel()


def _programs(start: str) -> Iterable[str]:
    """Yield the names of programs in PATH that start so."""
    folders: Sequence[str] = os.environ.get("PATH", "").split(os.pathsep)
    for folder in filter(None, folders):
        try:
            entries = [each for each in os.scandir(Path(folder)) if each.name.startswith(start)]
        except OSError:
            continue
        yield from (each.name for each in entries if os.access(each.path, os.X_OK) and not each.is_dir())
