"""Reports failures: one line with a message and a hint, JSON where requested, and the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeGuard

import click

from mig_agent.core.errors import Blocker, MigAgentError, Reason, UsageError
from mig_agent.core.texts import visible

if TYPE_CHECKING:
    from mig_agent.client.errors import ClientError
    from mig_agent.client.types import StartEstimate

DONE = 0
USAGE = 2
REFUSED = 3
NO_AGENT = 4
GAVE_UP_WAITING = 5
TIMED_OUT = 124
"""The lease of `migctl run` reached its deadline, and the command was ended: as timeout(1) does it."""
COULD_NOT_RUN = 125
"""`migctl run` itself failed."""
NOT_WHOLE = 127
"""A library of the command line is not installed; also the code of the script that starts this program."""
INTERRUPTED = 130
BROKEN_PIPE = 141
_CODES = MappingProxyType(
    {Reason.WAITED_TOO_LONG.value: GAVE_UP_WAITING, "no-agent": NO_AGENT, "failed": NO_AGENT},
)
"""Exit codes by the reason of a client error; all others are REFUSED."""
MOST_GPUS = 16
"""The most GPUs whose blockers are shown to a person; JSON has all blockers."""
_NEAR = 0.8
"""How alike two words must be for a guess, from 0 to 1 as difflib counts."""
_LEAST_PART = 3
"""Letters that a part of an option's name must have to stand for it."""


class StdoutClosedError(Exception):
    """Stdout was closed by its reader. Not a BrokenPipeError, for which click would exit with a code of its own."""


class LeftQueueError(MigAgentError):
    """Ctrl-C while a request waited."""

    def __init__(self) -> None:
        super().__init__("cannot wait any longer: interrupted; the request has left the queue")


def report(error: Exception, *, json: bool, code: int | None = None, program: str = "migctl") -> int:
    """Report a failure on stderr, and as JSON on stdout if asked for; return `code` or the usual exit code."""
    usual, reason, message, hint, retryable, blockers = _facts(error)
    _print_message(message, hint, blockers, program)
    if json:
        _print_failure(
            reason=reason,
            message=message,
            hint=hint,
            retryable=retryable,
            blockers=blockers,
            explanation=error.explanation if is_client_error(error) else (),
            revision=error.revision if is_client_error(error) else None,
            changed=error.changed if is_client_error(error) else (),
            estimate=error.estimate if is_client_error(error) else None,
        )
    return usual if code is None else code


def report_message(message: str, hint: str = "", *, code: int) -> int:
    """Report a failure on stderr. Return `code`."""
    _print_message(message, hint, ())
    return code


def wants_json(arguments: Sequence[str]) -> bool:
    """Return True if a command line asks for JSON, even one that cannot be understood."""
    return _wants("json", arguments)


def fail_in_shell(arguments: Sequence[str]) -> None:
    """Print `false` if a failed request was to print lines for a shell: so `eval "$(migctl request ...)"` fails too."""
    if "request" in arguments and _wants("env", arguments):
        print("false", flush=True)


def _wants(output: str, arguments: Sequence[str]) -> bool:
    before = list(arguments[: arguments.index("--")]) if "--" in arguments else list(arguments)
    pairs = zip(before, [*before, ""][1:], strict=True)
    return any(
        (name in {"-o", "--output"} and value == output) or name in {f"-o{output}", f"--output={output}"}
        for name, value in pairs
    )


def one_line(text: str) -> str:
    """Return text on one line, with nothing that moves a cursor."""
    return visible(text if text.isprintable() else " ".join(text.split()))


def near_guess(typed: str, known: Iterable[str]) -> str:
    """Return what a mistyped word was likely meant to be; empty if nothing is near: a far guess only misleads."""
    from difflib import get_close_matches  # noqa: PLC0415 -- only where it is needed

    known = tuple(known)
    for near in get_close_matches(typed, known, n=1, cutoff=_NEAR):
        return near
    # `--mem`, as Slurm has it, is `--gpu-memory`.
    word = typed.strip("-")
    holding = [each for each in known if len(word) >= _LEAST_PART and word in each]
    return holding[0] if len(holding) == 1 else ""


def _print_message(message: str, hint: str, blockers: Sequence[Blocker], program: str = "migctl") -> None:
    ending = f". Hint: {hint}" if hint else ""
    lines = [f"{program}: {one_line(message + ending)}"]
    by_gpu: dict[int, list[Blocker]] = {}
    for each in blockers:
        by_gpu.setdefault(each.gpu_index, []).append(each)
    listed = [each for each in by_gpu.values() if not (len(each) == 1 and _is_said(each[0], message))]
    lines += [f"  {one_line(_summary(each))}" for each in listed[:MOST_GPUS]]
    if len(listed) > MOST_GPUS:
        lines.append(f"  and {len(listed) - MOST_GPUS} more GPUs")
    print("\n".join(lines), file=sys.stderr)


def _is_said(blocker: Blocker, message: str) -> bool:
    """Return True if the message says all that would be listed of a blocker."""
    where = f"GPU {blocker.gpu_index}"
    return blocker.describe() in message or (where in message and f"{blocker.what} {blocker.condition}" in message)


def _summary(blockers: Sequence[Blocker]) -> str:
    """Return what blocks one GPU in one line: `GPU 0: leased to alice, bob; 1g.10gb on slice 6 is blocked`."""
    if len(blockers) == 1:
        return blockers[0].describe()
    holders: dict[str, dict[str, None]] = {}
    for each in blockers:
        if each.holder:
            holders.setdefault(each.state, {})[each.holder] = None
    states = [f"{state} to {', '.join(names)}" for state, names in holders.items()]
    without: dict[str, list[str]] = {}
    for each in blockers:
        if not each.holder:
            without.setdefault(each.state, []).append(each.what)
    for state, things in without.items():
        states.append(f"{things[0]} is {state}" if len(things) == 1 else f"{len(things)} devices are {state}")
    return f"GPU {blockers[0].gpu_index}: {'; '.join(states)}"


def _facts(error: Exception) -> tuple[int, str, str, str, bool, tuple[Blocker, ...]]:
    """Return exit code, reason, message, hint, whether it may work later, and the blockers."""
    match error:
        case LeftQueueError():
            return INTERRUPTED, Reason.CANCELLED, str(error), "ask again; it goes to the end of the queue", True, ()
        case UsageError():
            return USAGE, Reason.INVALID_REQUEST, error.message, error.hint, False, ()
        case click.ClickException():
            message, hint = message_and_hint(error)
            return USAGE, Reason.INVALID_REQUEST, message, hint, False, ()
        case _ if is_client_error(error):
            code = _CODES.get(error.reason, REFUSED)
            return code, error.reason, error.message, error.hint, error.retryable, error.blockers
        case _:
            return NO_AGENT, "failed", f"cannot go on: {error}", "", False, ()


def is_client_error(error: Exception) -> TypeGuard[ClientError]:
    """Return True if the client raised it; does not import the client for that."""
    return isinstance(error, MigAgentError) and hasattr(error, "retryable")


def message_and_hint(error: click.ClickException, program: str = "migctl") -> tuple[str, str]:
    """Return click's message in the form of all errors: a message that starts with "cannot", and a hint."""
    context = getattr(error, "ctx", None)
    see = f"see `{context.command_path if context is not None else program} --help`"
    match error:
        case click.NoSuchOption():
            near = near_guess(error.option_name, _options_of(context))
            return (
                f"cannot understand {error.option_name}: there is no such option",
                f"did you mean {near}?" if near else see,
            )
        case click.MissingParameter():
            called = f"call `{context.command_path}`" if context is not None else "do that"
            return f"cannot {called} without {_parameter(error)}", see
        case click.BadParameter():
            return f"cannot take that for {_parameter(error)}: {_lowered(error.message)}", see
        case click.UsageError():
            return f"cannot understand the command line: {_lowered(error.message)}", see
        case _:
            return f"cannot go on: {_lowered(error.format_message())}", ""


def _options_of(context: click.Context | None) -> tuple[str, ...]:
    """Return the options that a command takes."""
    if context is None:
        return ()
    return tuple(name for each in context.command.get_params(context) for name in each.opts if name.startswith("--"))


def _parameter(error: click.BadParameter) -> str:
    if error.param is None:
        return "an argument"
    if isinstance(error.param, click.Option) or error.ctx is None:
        return max(error.param.opts, key=len)
    return error.param.make_metavar(error.ctx).rstrip(".")


def _lowered(text: str) -> str:
    stripped = text.strip().rstrip(".")
    return stripped[:1].lower() + stripped[1:]


def _print_failure(
    *,
    reason: str,
    message: str,
    hint: str,
    retryable: bool,
    blockers: tuple[Blocker, ...],
    explanation: tuple[str, ...],
    revision: int | None,
    changed: tuple[str, ...],
    estimate: StartEstimate | None,
) -> None:
    from mig_agent.client import to_json  # noqa: PLC0415 -- only where it is needed

    failure = to_json.failure(
        reason=reason,
        message=message,
        hint=hint,
        retryable=retryable,
        blockers=blockers,
        explanation=explanation,
        revision=revision,
        changed=changed,
        estimate=estimate,
    )
    print(json.dumps(to_json.shown(failure)), flush=True)
