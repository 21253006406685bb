"""The command line as a whole: its verbs, their common options, and the exit code for each way to end."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

import click

from mig_agent import __version__
from mig_agent.core.errors import MigAgentError, UsageError
from mig_agent.core.quantities import shown
from mig_agent.migctl import failures
from mig_agent.migctl.options import COMMON_OPTIONS, Common

_PACKAGE = "mig_agent.migctl.commands"
_OF_OUTPUT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})
"""Errors that writing to stdout may have."""
_VERBS = {
    "request": "request",
    "run": "run",
    "release": "lease_changes",
    "renew": "lease_changes",
    "recover": "lease_changes",
    "cancel": "cancel",
    "status": "status",
    "show": "show",
    "profiles": "profiles",
    "plan": "plan",
    "reclaim": "admin",
    "cordon": "admin",
    "uncordon": "admin",
    "drain": "draining",
    "undrain": "draining",
    "mode": "admin",
    "adopt": "admin",
    "pause": "pausing",
    "resume": "pausing",
    "events": "events",
    "top": "top",
    "usage": "usage",
    "advise": "advise",
    "doctor": "doctor",
    "bundle": "bundle",
    "context": "context",
    "completion": "completion",
    "help": "help",
    "version": "help",
}
"""Each command and its module."""


class _Verbs(click.Group):
    """Imports a verb's module when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's signature
        """Return the verbs in the order in which people need them."""
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 -- click's signature
        """Return the verb, or None if there is none of that name."""
        if cmd_name not in _VERBS:
            return None
        command = getattr(importlib.import_module(f"{_PACKAGE}.{_VERBS[cmd_name]}"), cmd_name)
        return command if isinstance(command, click.Command) else None

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Raises click.Abort for Ctrl-C, and StdoutClosedError for a reader that has gone.

        For KeyboardInterrupt click would print an empty line, and for BrokenPipeError exit with a code of its own.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise click.Abort from error
        except BrokenPipeError as error:
            raise failures.StdoutClosedError from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command's name, the command and the rest. Raises UsageError."""
        if args and args[0] not in _VERBS and not ctx.resilient_parsing:
            near = failures.near_guess(args[0], _VERBS)
            hint = f"did you mean {near}?" if near else "see `migctl help`"
            raise UsageError(f"cannot understand {shown(args[0])}: there is no such command", hint)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[option() for option in COMMON_OPTIONS],
    invoke_without_command=True,
)
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def cli(context: click.Context, /, **common: str | None) -> None:
    """Ask for GPU memory, and get a MIG instance made for it.

    \b
      migctl run --gpu-memory 4G -- python train.py
      migctl request --mig-profile 1g.10gb
      migctl status

    \b
    Exit codes: 0 done, 2 wrong usage, 3 refused, 4 no agent, 5 gave up waiting.
    `run` gives the command's own code, and 125 when it could not run it.
    """  # noqa: D301 -- \b is click's mark for a paragraph that keeps its lines
    context.obj = Common.of(common)
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run_command_line(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code. Nothing that a person types ends in a traceback."""
    try:
        return _run(arguments)
    except (KeyboardInterrupt, click.Abort):
        failures.fail_in_shell(arguments)
        return failures.INTERRUPTED
    except (BrokenPipeError, failures.StdoutClosedError):
        _close_stdout()
        return failures.BROKEN_PIPE
    except OSError as error:
        _close_stdout()
        doing = "write the output" if error.errno in _OF_OUTPUT and not error.filename else "go on"
        return failures.report_message(f"cannot {doing}: {error.strerror or error}", code=1)


def _run(arguments: Sequence[str]) -> int:
    try:
        code = cli.main(args=list(arguments), prog_name="migctl", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.ClickException, MigAgentError) as error:
        failures.fail_in_shell(arguments)
        return failures.report(error, json=failures.wants_json(arguments))
    except ModuleNotFoundError as error:  # an environment that has the distribution mig-agent-client, or a part of it
        failures.fail_in_shell(arguments)
        return _report_missing(error.name or "")
    return code if isinstance(code, int) else failures.DONE


def _report_missing(module: str) -> int:
    """Report a library that is not installed. Return the exit code."""
    package = module.partition(".")[0]
    if package == "mig_agent":
        why, hint = f"this client is installed without {module}", "run the migctl of the agent's own installation"
    else:
        why, hint = f"there is no {package} here", "pip install 'mig-agent-client[migctl]'"
    return failures.report_message(f"cannot go on: {why}", hint, code=failures.NOT_WHOLE)


def _close_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter does not try to write the rest at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
