"""Sources of settings: file, environment and flags; each value has its place for messages."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mig_agent.config.field_types import ENVIRONMENT_PREFIX
from mig_agent.config.problems import Problem
from mig_agent.config.sections import Section, section_of
from mig_agent.config.settings import ROWS
from mig_agent.core.quantities import shown
from mig_agent.yaml_files import NULL, YamlFileError, read_mapping

_CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
_OTHERS = frozenset(
    ENVIRONMENT_PREFIX + name
    for name in (
        *("ADDRESS", "CONTEXT", "LEASE", "DEVICE_INDEX", "DEVICE_COUNT", "TLS_CA", "TLS_SERVER_NAME"),
        *("CONFIG", "CRASH_AT", "CHECK_THREADS"),
    )
)
"""Variables of the clients, and of this program, that are no settings."""
_SIMILARITY = 0.8
"""Similarity from which a variable counts as a mistyped setting.

A Kubernetes service of this name makes variables such as MIG_AGENT_PORT, which are no mistake.
"""


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and where."""

    value: str | tuple[str, ...] | Section
    where: str
    """Place for messages: `reread in /etc/mig-agent/config.yaml, line 4`, `MIG_AGENT_REREAD`, `--reread`."""
    file: Path | None = None
    line: int | None = None


@dataclass(slots=True)
class Found:
    """The values that one source gives, and the mistakes in it."""

    given: dict[str, Given] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def from_flags(flags: Mapping[str, str | tuple[str, ...] | None]) -> Found:
    """Return the values of the command line; None is a flag that was not given."""
    return Found({name: Given(value, ROWS[name].flag) for name, value in flags.items() if value is not None})


def from_environment(environment: Mapping[str, str]) -> Found:
    """Return the values of MIG_AGENT_ variables; a mistyped one is a problem."""
    found = Found()
    variables = {row.variable: row.name for row in ROWS.values()}
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in variables and variable not in _OTHERS:
            near = difflib.get_close_matches(variable, variables, n=1, cutoff=_SIMILARITY)
            if near:
                found.problems.append(
                    Problem(message=f"cannot use {variable}: it is not a setting", hint=f"did you mean {near[0]}?")
                )
    set_ones = {variable: environment.get(variable, "") for variable in variables}
    # A service file or a pod unsets a variable by making it empty.
    found.given = {variables[variable]: Given(text, variable) for variable, text in set_ones.items() if text}
    return found


def from_cuda(environment: Mapping[str, str]) -> Found:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible; that it leaves none is a problem."""
    text = environment.get(_CUDA_VARIABLE)
    if text is None or text.strip() in {"all", "void"}:
        return Found()
    names = [part.strip() for part in text.split(",") if part.strip()]
    if any(name.startswith("MIG-") for name in names):
        return _of_gpus(
            f"cannot use {_CUDA_VARIABLE}={shown(text)}: it names MIG devices, and the agent manages whole GPUs",
            "unset it, or name the GPUs with --gpus",
        )
    # CUDA uses the names before the first invalid one.
    seen = names[: next((n for n, name in enumerate(names) if name.startswith("-")), len(names))]
    if not seen:
        return _of_gpus(
            f"cannot serve: {_CUDA_VARIABLE}={shown(text)} leaves no GPU visible", "unset it, or use --gpus"
        )
    return Found({"gpus": Given(tuple(seen), _CUDA_VARIABLE)})


def _of_gpus(message: str, hint: str) -> Found:
    return Found(problems=[Problem(message=message, hint=hint, setting="gpus")])


def from_file(path: Path) -> Found:
    """Return the values of a YAML file; the problems name the lines of its mistakes."""
    hint = "give another with --config"
    try:
        root = read_mapping(path, noun="the configuration", holds="settings", unreadable_hint=hint)
    except YamlFileError as error:
        return Found(problems=[Problem(message=error.message, hint=error.hint, file=path, line=error.line)])
    return Found() if root is None else _settings_of(root, path)


def _settings_of(root: yaml.MappingNode, path: Path) -> Found:
    found = Found()
    lines: dict[str, int] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else "this key"
        place = f"{shown(name)} in {path}, line {line}"
        message = hint = ""
        written: str | tuple[str, ...] | Section | None = _value(value)
        if name in ROWS and ROWS[name].kind.section is not None and isinstance(value, yaml.MappingNode):
            written = section_of(value, name, str(path))
        if name not in ROWS:
            message, hint = f"cannot use {place}: it is not a setting", _nearest(name)
        elif name in lines:
            message, hint = f"cannot use {place}: line {lines[name]} sets it already", "remove one of them"
        elif written is None:
            message = f"cannot use {place}: it takes a value or a plain list"
            hint = f"write {name}: {ROWS[name].example}"
        if message:
            setting = name if name in ROWS else ""
            found.problems.append(Problem(message=message, hint=hint, setting=setting, file=path, line=line))
        elif written is not None and value.tag != NULL:
            found.given[name] = Given(written, place, path, line)
        lines.setdefault(name, line)
    return found


def _value(node: yaml.Node) -> str | tuple[str, ...] | None:
    """Return the text or texts of a value; None for what no setting takes, such as a mapping."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.ScalarNode) for each in node.value):
        return tuple(str(each.value) for each in node.value)
    return None


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), ROWS, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "docs/configuration.md lists them all"
