"""The part of docs/reference/migctl.md that lists every command with its options, from the parser itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from mig_agent.migctl.cli import cli
from mig_agent.migctl.options import Common

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/migctl.md"
_BEGIN, _END = "<!-- commands: hack/generate.py writes what follows -->\n", "<!-- end -->\n"
_COMMON = Common.__dataclass_fields__.keys()


def page() -> str:
    """Return the page with the commands as they are now; the text around them is kept."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    lines = "\n".join(_lines())
    return f"{before}{_BEGIN}\n{lines}\n{_END}{after}"


def _lines() -> Iterator[str]:
    context = click.Context(cli, info_name="migctl")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is not None:
            yield from _command(command, click.Context(command, info_name=name, parent=context))


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield from (f"### {context.command_path}", "")
    arguments = [each for each in command.collect_usage_pieces(context) if each != "[OPTIONS]"]
    if arguments:
        yield from (f"`{' '.join([context.command_path, '[OPTIONS]', *arguments])}`", "")
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        lines = paragraph.split("\n")
        if lines[0].strip() == "\b":
            yield from ("```sh", *(line.removeprefix("  ") for line in lines[1:]), "```", "")
        else:
            yield from (" ".join(line.strip() for line in lines), "")
    rows = [record for each in command.get_params(context) if (record := _row(each, context)) is not None]
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            if below is not None:
                yield from _command(below, click.Context(below, info_name=each, parent=context))
        return
    if rows:
        yield from ("| option | |", "|---|---|", *(f"| `{option}` | {words} |" for option, words in rows), "")


def _row(parameter: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    """Return an option of this command and its help; None for an argument and for what every command takes."""
    record = parameter.get_help_record(context)
    if not isinstance(parameter, click.Option) or record is None:
        return None
    if "--help" in parameter.opts or parameter.name in _COMMON:
        return None
    return record[0].replace("|", "\\|"), record[1].replace("|", "\\|")
