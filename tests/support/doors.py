"""Reads the agent's source for whatever changes something outside the process, and says what goes round the door.

The door is `with FAILPOINTS.around(NAME):` (mig_agent.adapters.failpoints). A change is behind it where it stands
inside such a block, or in a private function all of whose calls in the same module do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "agent/mig_agent"
AGENT_PARTS = ("adapters", "core", "engine", "frontends", "daemon", "elastic")
"""What runs in the agent's process, and in a training; the simulator stands for the hardware, others are clients."""

_OS = frozenset(
    [
        "mknod",
        "unlink",
        "remove",
        "rename",
        "replace",
        "renames",
        "link",
        "symlink",
        "mkdir",
        "makedirs",
        "rmdir",
        "removedirs",
        "chmod",
        "lchown",
        "chown",
        "fchmod",
        "fchown",
        "truncate",
        "ftruncate",
        "write",
        "pwrite",
        "writev",
        "sendfile",
        "utime",
        "setxattr",
        "removexattr",
        "mkfifo",
    ]
)
_PATH = frozenset(
    [
        "write_text",
        "write_bytes",
        "touch",
        "unlink",
        "rename",
        "mkdir",
        "rmdir",
        "chmod",
        "lchmod",
        "symlink_to",
        "hardlink_to",
    ]
)
_WRITING_FLAGS = frozenset(["O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"])
_READING_SQL = re.compile(
    r"\s*(SELECT\b|PRAGMA \w+$|PRAGMA integrity_check|PRAGMA (synchronous|wal_autocheckpoint) = "
    r"|CREATE TEMP |BEGIN IMMEDIATE$|UPDATE head SET id = id$|ROLLBACK$)"
)
"""The settings and triggers named here are those of one connection, not of the file; the update is rolled back."""


@dataclass(frozen=True, slots=True)
class Change:
    """A call that changes something."""

    where: str
    """`host.py:217 _make_node`"""
    what: str


@dataclass(slots=True)
class _Function:
    name: str
    changes: list[Change] = field(default_factory=list)
    """Not behind a door inside the function itself."""
    calls: list[str] = field(default_factory=list)
    """Functions of the module that it calls outside of a door."""
    guarded_calls: list[str] = field(default_factory=list)


class Source(ast.NodeVisitor):
    """One module: its doors, and the changes that stand before none."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._functions = {"": _Function("")}
        self._stack = [""]
        self._inside = 0
        self.doors: set[str] = set()
        """Names of the doors; `*` where the name is a variable."""
        tree = ast.parse(text)
        self._constants = {
            target.id: each.value
            for each in tree.body
            if isinstance(each, ast.Assign)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        self.visit(tree)

    def round_the_door(self) -> list[Change]:
        """Changes that no door stands before."""
        unguarded = {name for name in self._functions if not self._is_guarded(name, frozenset())}
        return [change for name in unguarded for change in self._functions[name].changes]

    def _is_guarded(self, name: str, seen: frozenset[str]) -> bool:
        if not name.startswith("_") or name.startswith("__") or name in seen:
            return False
        callers = [each for each in self._functions.values() if name in each.calls]
        called = any(name in each.guarded_calls for each in self._functions.values())
        return (called or bool(callers)) and all(self._is_guarded(each.name, seen | {name}) for each in callers)

    # Walking

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.setdefault(node.name, _Function(node.name))
        self._stack.append(node.name)
        inside, self._inside = self._inside, 0  # a function that is made inside a door runs where it is called
        self.generic_visit(node)
        self._inside = inside
        self._stack.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)  # type: ignore[arg-type] # alike in all that is looked at

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
        doors = [name for item in node.items if (name := _door(item.context_expr))]
        self.doors.update(doors)
        self._inside += bool(doors)
        for statement in node.body:
            self.visit(statement)
        self._inside -= bool(doors)

    def visit_Call(self, node: ast.Call) -> None:
        function = self._functions[self._stack[-1]]
        what = _changed_by(node, self._constants)
        if what and not self._inside:
            function.changes.append(Change(f"{self._path.name}:{node.lineno} {self._stack[-1]}", what))
        called = _own_function(node)
        if called:
            (function.guarded_calls if self._inside else function.calls).append(called)
        self.generic_visit(node)


def _door(node: ast.expr) -> str:
    """The name of the door that this opens; empty where it is none."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "around"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "FAILPOINTS"
    ):
        argument = node.args[0]
        return str(argument.value) if isinstance(argument, ast.Constant) else "*"
    return ""


def _own_function(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            return name
        case _:
            return ""


def _changed_by(node: ast.Call, constants: Mapping[str, ast.expr]) -> str:  # noqa: C901, PLR0911 -- a list of cases
    """What this call changes, in short; empty where it changes nothing."""
    match node.func:
        case ast.Attribute(value=ast.Name(id="os"), attr="open"):
            flags = {each.attr for argument in node.args[1:] for each in ast.walk(argument) if _is_flag(each)}  # type: ignore[attr-defined] # a flag is an attribute
            return "os.open for writing" if flags & _WRITING_FLAGS else ""
        case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in _OS:
            return f"os.{name}"
        case ast.Attribute(value=ast.Name(id="shutil" | "subprocess" as module), attr=name) if name != "which":
            return f"{module}.{name}"
        case ast.Attribute(value=ast.Name(id="pynvml"), attr=name) if name.startswith("nvml") and name != "nvmlLib":
            return f"pynvml.{name}"
        case ast.Name(id="open") | ast.Attribute(attr="open", value=ast.Name(id="io")):
            return "open for writing" if _writes(node.args[1:2], node.keywords) else ""
        case ast.Attribute(attr="open") if _writes(node.args[:1], node.keywords):
            return "open for writing"
        case ast.Attribute(attr="replace") if len(node.args) == 1 and not node.keywords:
            return "a file's replace"  # that of a text takes two
        case ast.Attribute(attr="execute" | "executemany" | "executescript") | ast.Name(id="execute"):
            return "" if _reads(node.args[0], constants) else "SQL that writes"
        case ast.Attribute(attr=name, value=value) if name in _PATH and not _is_state(name, value):
            return f"a file's {name}"
        case ast.Attribute(attr="request" | "urlopen") if node.args and not _is_get(node.args[0]):
            return "a request over HTTP"
        case ast.Name(id="getattr") if isinstance(node.args[0], ast.Name) and node.args[0].id == "pynvml":
            return "any call of pynvml"
        case _:
            return ""


def _is_flag(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr.startswith("O_")


def _is_get(method: ast.expr) -> bool:
    return isinstance(method, ast.Constant) and method.value == "GET"


def _writes(mode: list[ast.expr], keywords: list[ast.keyword]) -> bool:
    modes = [*mode, *(each.value for each in keywords if each.arg == "mode")]
    return any(isinstance(each, ast.Constant) and set(str(each.value)) & set("wax+") for each in modes)


def _reads(sql: ast.expr, constants: Mapping[str, ast.expr]) -> bool:
    while not isinstance(sql, ast.Constant):
        match sql:
            case ast.JoinedStr(values=[first, *_]) | ast.BinOp(left=first):
                sql = first
            case ast.Name(id=name) if name in constants:
                sql = constants[name]
            case _:
                return False
    return bool(_READING_SQL.match(str(sql.value)))


def _is_state(name: str, value: ast.expr) -> bool:
    """`self.touch(gpu)`, `context.state.touch(gpu)`: the engine's own state, in memory."""
    owner = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
    return name == "touch" and owner in {"self", "state"}


def sources() -> Iterator[tuple[Path, Source]]:
    """Every module of the agent."""
    for part in AGENT_PARTS:
        for path in sorted((PACKAGE / part).rglob("*.py")):
            yield path.relative_to(PACKAGE), Source(path, path.read_text(encoding="utf-8"))


def nvml_calls() -> frozenset[str]:
    """The NVML functions that the adapter calls, read from its source."""
    text = (PACKAGE / "adapters/nvml/calls.py").read_text(encoding="utf-8")
    constants = {
        str(node.value) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and _is_call(node.value)
    }
    return frozenset(constants)


def _is_call(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"nvml[A-Z]\w+", value) is not None


def doors() -> frozenset[str]:
    """The names of all doors; those of the driver's calls among them."""
    from mig_agent.adapters.nvml.calls import CHANGING  # noqa: PLC0415 -- reading source needs no pynvml

    named = {name for _, source in sources() for name in source.doors if name != "*"}
    return frozenset(named | CHANGING)
