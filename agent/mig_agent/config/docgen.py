"""Generates the documents about the settings from their table: the example file and the page."""

from __future__ import annotations

import re
import textwrap

from mig_agent.config.field_types import Row
from mig_agent.config.settings import groups

_WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z0-9_./-][A-Za-z0-9_./:+@ -]*")
_MADE = "Made by hack/docs.sh from agent/mig_agent/config/settings.py; change it there."


def example_file() -> str:
    """Return a configuration file with every setting explained, set to its default or commented out."""
    lines = [
        f"# {_MADE}",
        "# The configuration of `mig-agent serve --config FILE`. Every setting is optional.",
        "# A flag (--state-dir) wins over the environment (MIG_AGENT_STATE_DIR), which wins over this file.",
    ]
    for group, members in groups().items():
        lines += ["", f"## {group}"]
        for row in members:
            lines += ["", *textwrap.wrap(row.words, _WIDTH, initial_indent="# ", subsequent_indent="# ")]
            if row.when_unset:
                lines += textwrap.wrap(
                    f"Not set: {row.when_unset}.", _WIDTH, initial_indent="# ", subsequent_indent="# "
                )
                lines.append(f"# {row.name}: {_yaml(row, row.example)}")
            elif not row.default:
                lines.append(f"# {row.name}: {_yaml(row, row.example)}")
            else:
                lines.append(f"{row.name}: {_yaml(row, row.default)}")
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
        "environment and `--state-dir` as a flag. Lists are YAML lists, or texts with commas between. What cannot be",
        "meant is refused at the start, with the file and the line.",
        "[mig-agent.example.yaml](mig-agent.example.yaml) has every setting in it.",
    ]
    for group, members in groups().items():
        lines += ["", f"## {group}", "", "| setting | what it does | value | default |", "|---|---|---|---|"]
        lines += [f"| `{row.name}` | {row.words} | {row.kind.words} | {_default(row)} |" for row in members]
    return "\n".join(lines) + "\n"


def _default(row: Row) -> str:
    if row.when_unset:
        return row.when_unset
    return f"`{row.default}`" if row.default else "none"
