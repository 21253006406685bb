"""`migctl help` and `migctl version`."""

from __future__ import annotations

import click

from mig_agent import __version__
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown
from mig_agent.migctl import failures
from mig_agent.migctl.options import CONNECTION, Common, completer_of, verb
from mig_agent.migctl.printing import print_json, print_whole


@click.command(short_help="Show this help, or that of a command.")
@click.argument("topic", metavar="[COMMAND|connection]", required=False, shell_complete=completer_of("topic"))
@click.pass_context
def help(context: click.Context, topic: str | None) -> int:  # noqa: A001 -- the name of the command
    """Show this help, that of a command, or of how the agent is reached (`migctl help connection`)."""
    root = context.find_root()
    if topic == "connection":
        print_whole(CONNECTION.rstrip("\n"))
        return failures.DONE
    if topic is None:
        print_whole(root.get_help())
        return failures.DONE
    group = root.command
    command = group.get_command(root, topic) if isinstance(group, click.Group) else None
    if command is None:
        near = failures.near_guess(topic, [*root.command.list_commands(root), "connection"])  # type: ignore[attr-defined] # a Group
        raise UsageError(
            f"cannot help with {shown(topic)}: there is no such command",
            f"did you mean {near}?" if near else "see `migctl help`",
        )
    with click.Context(command, info_name=topic, parent=root) as own:
        print_whole(command.get_help(own))
    return failures.DONE


@verb(short_help="Show the version of migctl.")
def version(common: Common) -> int:
    """Show the version of migctl; `migctl status -o json` has the agent's."""
    if common.wants() == "json":
        print_json({"version": __version__})
    else:
        print(__version__)
    return failures.DONE
