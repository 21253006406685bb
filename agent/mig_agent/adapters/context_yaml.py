"""The YAML of a file of contexts: reads it with the line of each mistake, and writes it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

import yaml

from mig_agent.adapters.context_files import CONTEXTS_KEY, CURRENT_KEY, KEYS, AgentContext, ContextFile, check_name
from mig_agent.core.errors import ConfigError
from mig_agent.core.quantities import shown
from mig_agent.yaml_files import NULL, read_mapping

_HEADING = "# Contexts of migctl. `migctl context` rewrites this file, without comments.\n"


def parse_file(path: Path) -> ContextFile:
    """Return what a file says. Raises ConfigError."""
    root = read_mapping(path, holds="contexts", unreadable_hint="mend it, or name the agent with --address")
    contexts: dict[str, AgentContext] = {}
    current, current_line = None, None
    seen: dict[str, int] = {}
    for key, value in () if root is None else root.value:
        name, line = _text(key) or "this key", key.start_mark.line + 1
        if name in seen:
            raise ConfigError(
                f"cannot use {name} in {path}, line {line}: line {seen[name]} sets it already", "remove one of them"
            )
        seen[name] = line
        if name == CURRENT_KEY:
            current, current_line = _current(value, path), line
        elif name == CONTEXTS_KEY:
            contexts = dict(_contexts(value, path))
        else:
            near = _near(name, (CONTEXTS_KEY, CURRENT_KEY))
            hint = f"did you mean {near}?" if near else f"such a file has {CURRENT_KEY} and {CONTEXTS_KEY}"
            raise ConfigError(f"cannot use {shown(name)} in {path}, line {line}: there is no such key", hint)
    return ContextFile(path=path, contexts=contexts, current=current, current_line=current_line)


def dump_file(file: ContextFile) -> str:
    """Return the text of a file."""
    found: dict[str, object] = {} if file.current is None else {CURRENT_KEY: file.current or None}
    found[CONTEXTS_KEY] = {
        name: {key: getattr(each, key) for key in KEYS if getattr(each, key)} for name, each in file.contexts.items()
    }
    text: str = yaml.safe_dump(found, sort_keys=False, allow_unicode=True)
    return _HEADING + text


def _current(value: yaml.Node, path: Path) -> str:
    name = _text(value)
    if name is None:
        raise ConfigError(
            f"cannot use {CURRENT_KEY} in {path}, line {value.start_mark.line + 1}: it takes the name of a context",
            f"write {CURRENT_KEY}: gpu3",
        )
    return name


def _contexts(value: yaml.Node, path: Path) -> Iterator[tuple[str, AgentContext]]:
    if not isinstance(value, yaml.MappingNode):
        if value.tag == NULL:
            return
        raise ConfigError(
            f"cannot use {CONTEXTS_KEY} in {path}, line {value.start_mark.line + 1}: it holds no names",
            "write a name on each line, and what it stands for below it",
        )
    seen: dict[str, int] = {}
    for key, entry in value.value:
        name, line = _text(key) or "", key.start_mark.line + 1
        check_at = f"cannot use context {shown(name)} in {path}, line {line}"
        if name in seen:
            raise ConfigError(f"{check_at}: line {seen[name]} has one of that name", "remove one of them")
        seen[name] = line
        yield name, _context(name, entry, path, line)


def _context(name: str, entry: yaml.Node, path: Path, line: int) -> AgentContext:
    """Return a context, with the first mistake in it."""
    values: dict[str, str] = {}
    lines = {"": line}
    mistake = hint = ""
    try:
        check_name(name)
        _read_values(name, entry, path, values, lines)
    except ConfigError as error:
        where = "" if str(path) in error.message else f" ({path}, line {line})"
        mistake, hint = f"{error.message}{where}", error.hint
    return AgentContext(name=name, file=path, lines=lines, mistake=mistake, hint=hint, **values)


def _read_values(name: str, entry: yaml.Node, path: Path, values: dict[str, str], lines: dict[str, int]) -> None:
    """Read what a context stands for into `values`, and the line of each into `lines`. Raises ConfigError."""
    for key, value in entry.value if isinstance(entry, yaml.MappingNode) else ():
        found, text = _text(key) or "this key", _text(value)
        where = f"cannot use {shown(found)} of context {name} in {path}, line {key.start_mark.line + 1}"
        if found not in KEYS:
            near = _near(found, KEYS)
            hint = f"did you mean {near}?" if near else f"it takes {', '.join(KEYS)}"
            raise ConfigError(f"{where}: there is no such key", hint)
        if found in values:
            raise ConfigError(f"{where}: line {lines[found]} sets it already", "remove one of them")
        if text is None:
            raise ConfigError(f"{where}: it takes a text", f"write {found}: {_example(found)}")
        values[found], lines[found] = text, key.start_mark.line + 1
    if not values.get("address"):
        where = f"cannot use context {name} in {path}, line {lines['']}"
        raise ConfigError(f"{where}: it has no address", f"write address: {_example('address')} below it")


def _text(node: yaml.Node) -> str | None:
    """Return a text, empty where nothing is written; None for a list or a mapping."""
    if not isinstance(node, yaml.ScalarNode):
        return None
    return "" if node.tag == NULL else str(node.value)


def _near(name: str, known: tuple[str, ...]) -> str:
    return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)), "")


def _example(key: str) -> str:
    return {"address": "gpu3.example.com:7400", "tls_server_name": "gpu3.example.com"}.get(key, f"{key[4:]}.pem")
