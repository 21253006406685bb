"""The flags of `mig-agent serve`, generated from the table of settings."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click

from mig_agent.config.field_types import Row
from mig_agent.config.settings import ROWS, groups


def settings_flags() -> list[click.Parameter]:
    """Return one flag per setting; their values arrive under the settings' names."""
    return [_option(row) for row in ROWS.values()]


def _option(row: Row) -> click.Option:
    if row.kind.is_switch:
        declaration = f"{row.flag}/--no-{row.flag.removeprefix('--')}"
        return click.Option([declaration, row.name], default=None, help=_help(row))
    # A list may be one text with commas, several flags, or both.
    return click.Option([row.flag, row.name], metavar=row.kind.metavar, multiple=row.kind.many, help=_help(row))


def _help(row: Row) -> str:
    default = row.when_unset or row.default or "none"
    words = f"{row.words}  [default: {default}]"
    # On the command line the other settings are flags too.
    return re.sub("`([^`]+)`", lambda quoted: ROWS[quoted[1]].flag if quoted[1] in ROWS else quoted[1], words)


def texts_of(values: Mapping[str, object]) -> dict[str, str | tuple[str, ...] | None]:
    """Return click's values as `load` takes them."""
    found: dict[str, str | tuple[str, ...] | None] = {}
    for name, value in values.items():
        match value:
            case None | ():
                found[name] = None
            case bool():
                found[name] = "yes" if value else "no"
            case tuple():
                found[name] = tuple(str(each) for each in value)
            case _:
                found[name] = str(value)
    return found


class GroupedCommand(click.Command):
    """A command whose help lists the settings under their headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags by heading."""
        records = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        own = [record for name, record in records.items() if name not in ROWS]
        with formatter.section("Options"):
            formatter.write_dl(own)
        for group, members in groups().items():
            with formatter.section(group):
                formatter.write_dl([records[row.name] for row in members])
