"""Generates the documents about the settings from their table: the example file and the page."""

from __future__ import annotations

import re
import textwrap

from mig_agent.config.field_types import Row
from mig_agent.config.settings import groups

_WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z0-9_./-][A-Za-z0-9_./:+@ -]*")
_RESTART = "A change needs a restart."
_MADE = "Made by hack/docs.sh from agent/mig_agent/config/settings.py; change it there."


def example_file() -> str:
    """Return a configuration file with every setting explained and none set: each is commented out."""
    lines = [
        f"# {_MADE}",
        "# The configuration of `mig-agent serve --config FILE`. Every setting is optional, and none is set here:",
        "# a line such as #name: value shows the default (after `Not set:` an example). Remove its # to set it, type",
        "# `mig-agent check`, and then `systemctl reload mig-agent`; `restart` where it says so.",
        "# A flag (--state-dir) wins over the environment (MIG_AGENT_STATE_DIR), which wins over this file.",
    ]
    for group, members in groups().items():
        lines += ["", f"## {group}"]
        for row in members:
            lines += ["", *textwrap.wrap(row.words, _WIDTH, initial_indent="# ", subsequent_indent="# ")]
            notes = f"Not set: {row.when_unset}." if row.when_unset else ""
            notes = f"{notes} {_RESTART}".lstrip() if not row.live else notes
            lines += textwrap.wrap(notes, _WIDTH, initial_indent="# ", subsequent_indent="# ")
            lines.append(f"#{row.name}: {_yaml(row, row.default or row.example)}")
    return "\n".join(lines) + "\n"


def _yaml(row: Row, text: str) -> str:
    if row.kind.section is not None:
        return text  # a YAML mapping on one line
    if row.kind.many:
        return f"[{', '.join(_scalar(part.strip()) for part in text.split(','))}]"
    return _scalar(text)


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and ": " not in text else f'"{text}"'


def page() -> str:
    """Return docs/configuration.md."""
    lines = [
        f"<!-- {_MADE} -->",
        "# Configuration",
        "",
        "A setting comes from the file (`mig-agent serve --config FILE`, YAML), from the environment and from flags;",
        "the later one wins. Its name below is the one in the file; `state_dir` is `MIG_AGENT_STATE_DIR` in the",
        "environment and `--state-dir` as a flag. Lists are YAML lists, or texts with commas between. Mistakes are",
        "refused at the start, with the file and the line.",
        "[mig-agent.example.yaml](mig-agent.example.yaml) has every setting in it, commented out: it sets nothing.",
        "",
        "`mig-agent check` [says what is wrong](admin.md#changing-the-configuration) with a configuration, all of it",
        "at once. A running agent reads it again on `systemctl reload mig-agent` (SIGHUP): settings marked `reload`",
        "take effect at once, those marked `restart` with the next start.",
    ]
    head = ["| setting | what it does | value | default | changed by |", "|---|---|---|---|---|"]
    for group, members in groups().items():
        lines += ["", f"## {group}", "", *head, *map(_line, members)]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    changed_by = "reload" if row.live else "restart"
    value = row.kind.words + (f", {row.bounds}" if row.bounds else "")
    return f"| `{row.name}` | {row.words} | {value} | {_default(row)} | {changed_by} |"


def _default(row: Row) -> str:
    if row.when_unset:
        return row.when_unset
    return f"`{row.default}`" if row.default else "none"
