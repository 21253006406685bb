"""Writes the man pages of migctl, kubectl-mig, mig-agent and mig-agent-config from the programs' help and settings.

Usage: .venv/bin/python hack/manpages.py FOLDER     writes FOLDER/man1/migctl.1 and so on

The date on the pages is SOURCE_DATE_EPOCH where it is set, else today.
"""

from __future__ import annotations

import datetime as dt
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import click

from mig_agent import __version__
from mig_agent.config.field_types import Row
from mig_agent.config.settings import ROWS, groups
from mig_agent.kubectl.cli import cli as kubectl_cli
from mig_agent.migctl.cli import cli
from mig_agent.program import program

_FILES = {
    "/etc/mig-agent/config.yaml": "Settings of the service, see mig-agent-config(5).",
    "/run/mig-agent/mig-agent.sock": "Where clients connect: members of the group mig-agent.",
    "/run/mig-agent/admin.sock": "Where administrators connect: root.",
    "/var/lib/mig-agent": "The ledger of leases and the key of their tokens: root.",
    "/usr/share/doc/mig-agent": "The guide, the pages for administrators, an example of all settings.",
}
_CLIENT_FILES = {
    "~/.config/mig-agent/contexts.yaml": "Your contexts.",
    "/etc/xdg/mig-agent/contexts.yaml": "Contexts for every user of this machine.",
}
_CLIENT_ENVIRONMENT = {
    "MIG_AGENT_ADDRESS": "Where the agent is, without --address: unix:///path or host:port.",
    "MIG_AGENT_CONTEXT": "The context to use, without --context and without an address: see migctl context.",
    "MIG_AGENT_TLS_CA, MIG_AGENT_TLS_CERT, MIG_AGENT_TLS_KEY, MIG_AGENT_TLS_SERVER_NAME": (
        "The same as --tls-ca, --tls-cert, --tls-key and --tls-server-name."
    ),
}


def pages() -> Mapping[str, Callable[[], str]]:
    """Return what makes each page, by its path below the folder of man pages."""
    return {
        "man1/migctl.1": _migctl,
        "man1/kubectl-mig.1": _kubectl_mig,
        "man8/mig-agent.8": _mig_agent,
        "man5/mig-agent-config.5": _config,
    }


def _migctl() -> str:
    return _page(
        "migctl",
        1,
        "User Commands",
        "ask for GPU memory, and get a MIG instance",
        [
            *_described(cli, "migctl"),
            *_environment(_CLIENT_ENVIRONMENT),
            *_definitions("FILES", {f"\\fI{_text(path)}\\fR": words for path, words in _CLIENT_FILES.items()}),
            *_see_also("mig-agent(8)", "mig-agent-config(5)", "/usr/share/doc/mig-agent/guide.md"),
        ],
    )


def _kubectl_mig() -> str:
    return _page(
        "kubectl-mig",
        1,
        "User Commands",
        "show the GPUs of a cluster's nodes and who holds them",
        [
            *_described(kubectl_cli, "kubectl mig"),
            *_environment({"KUBECONFIG": "Where the cluster is, without --kubeconfig."}),
            *_see_also("migctl(1)", "/usr/share/doc/mig-agent/kubernetes.md"),
        ],
    )


def _mig_agent() -> str:
    return _page(
        "mig-agent",
        8,
        "System Administration",
        "the agent that makes MIG instances on request",
        [
            *_described(program, "mig-agent", left_out=ROWS),
            *_definitions("FILES", {f"\\fI{_text(path)}\\fR": words for path, words in _FILES.items()}),
            *_environment({"MIG_AGENT_NAME": "Each setting NAME of mig-agent-config(5), in capitals."}),
            *_see_also("migctl(1)", "mig-agent-config(5)", "systemctl(1)", "/usr/share/doc/mig-agent/admin.md"),
        ],
    )


def _config() -> str:
    return _page(
        "mig-agent-config",
        5,
        "File Formats",
        "settings of mig-agent",
        [
            ".SH DESCRIPTION",
            _text(
                "/etc/mig-agent/config.yaml is a YAML file with one setting a line: its name, a colon and a value. "
                "Every setting is optional. The environment (MIG_AGENT_STATE_DIR for state_dir) wins over the file, "
                "and a flag of mig-agent serve (--state-dir) over both. A setting that does not exist, or a value that "
                "cannot be used, is refused at the start with the file and the line."
            ),
            ".PP",
            "/usr/share/doc/mig-agent/mig-agent.example.yaml has all settings with their defaults.",
            *(line for group, rows in groups().items() for line in _settings(group, rows)),
            *_see_also("mig-agent(8)", "migctl(1)"),
        ],
    )


def _page(name: str, section: int, manual: str, summary: str, lines: Iterable[str]) -> str:
    made = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    date = dt.datetime.fromtimestamp(made, dt.UTC).date().isoformat()
    head = [
        f'.TH {name.upper()} {section} {date} "mig-agent {__version__}" "{manual}"',
        ".nh",
        ".ad l",
        ".SH NAME",
        f"{_text(name)} \\- {_text(summary)}",
    ]
    return "\n".join([*head, *lines]) + "\n"


def _described(group: click.Group, name: str, left_out: Iterable[str] = ()) -> Iterator[str]:
    """Yield a program's usage, its help, its options, and the same of each command."""
    context = click.Context(group, info_name=name, **group.context_settings)
    commands = {each: group.get_command(context, each) for each in group.list_commands(context)}
    common = {option for parameter in group.get_params(context) for option in parameter.opts}
    yield ".SH SYNOPSIS"
    yield f"\\fB{_text(name)}\\fR [\\fIOPTIONS\\fR] \\fICOMMAND\\fR [\\fIARGUMENTS\\fR]"
    yield ".SH DESCRIPTION"
    yield from _paragraphs(group.help or "")
    yield ".SH OPTIONS"
    if group is cli:
        yield "They are accepted before and behind each command."
    yield from _options(group, context)
    yield ".SH COMMANDS"
    for each, command in commands.items():
        if command is not None and not command.hidden:
            yield from _command(command, click.Context(command, info_name=each, parent=context), common, {*left_out})


def _command(command: click.Command, context: click.Context, common: set[str], left_out: set[str]) -> Iterator[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f".SS {_text(usage)}"
    yield from _paragraphs(command.help or "")
    yield from _options(command, context, common, left_out)
    if left_out <= {each.name for each in command.params} and left_out:
        yield ".PP"
        yield "Each setting of mig-agent-config(5) is a flag, too: \\fB\\-\\-state\\-dir\\fR for \\fIstate_dir\\fR."
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            if below is not None:
                yield from _command(below, click.Context(below, info_name=each, parent=context), common, left_out)


def _options(
    command: click.Command, context: click.Context, common: Iterable[str] = (), left_out: Iterable[str] = ()
) -> Iterator[str]:
    skipped = {*left_out}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or not record[1] or parameter.name in skipped or {*common} & {*parameter.opts}:
            continue
        yield ".TP"
        yield f"\\fB{_text(record[0])}\\fR"
        yield _text(record[1])


def _settings(group: str, rows: Iterable[Row]) -> Iterator[str]:
    yield f'.SH "{_text(group.upper())}"'
    for row in rows:
        default = row.when_unset or row.default or "none"
        yield ".TP"
        yield f"\\fB{_text(row.name)}\\fR: \\fI{_text(row.kind.metavar or 'yes|no')}\\fR"
        yield f"{_text(_plain(row.words))} Default: {_text(_plain(default))}. Value: {_text(_plain(row.kind.words))}."


def _environment(variables: Mapping[str, str]) -> Iterator[str]:
    return _definitions("ENVIRONMENT", {f"\\fB{_text(name)}\\fR": words for name, words in variables.items()})


def _definitions(heading: str, found: Mapping[str, str]) -> Iterator[str]:
    yield f".SH {heading}"
    for name, words in found.items():
        yield from (".TP", name, _text(words))


def _see_also(*pages: str) -> Iterator[str]:
    yield ".SH SEE ALSO"
    yield ", ".join(re.sub(r"^([\w-]+)\((\d)\)$", r"\\fB\1\\fR(\2)", page) for page in pages)


def _paragraphs(help_text: str) -> Iterator[str]:
    r"""Yield a click help text; a paragraph below `\b` keeps its lines."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", inspect.cleandoc(help_text.partition("\f")[0]))):
        if number:
            yield ".PP"
        lines = paragraph.split("\n")
        if lines[0].strip() == "\b":
            yield from (".nf", *(_text(line) for line in lines[1:]), ".fi")
        else:
            yield _text(" ".join(line.strip() for line in lines))


def _plain(markdown: str) -> str:
    return markdown.replace("`", "")


def _text(words: str) -> str:
    """Return words for roff: backslashes and hyphens as they are, and no line that begins as a request would."""
    escaped = words.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", escaped, flags=re.MULTILINE)


def main(folder: Path) -> None:
    """Write the pages below the folder."""
    for name, make in pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv[1:]) != 1:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
