"""The command line of `kubectl mig`: its commands, their options, and the exit code for each way to end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mig_agent import __version__
from mig_agent.core.errors import MigAgentError, UsageError
from mig_agent.core.quantities import parse_duration, shown
from mig_agent.migctl import failures
from mig_agent.migctl.top_view import ORDERS, View

if TYPE_CHECKING:
    from mig_agent.kubectl.agent_pods import AgentPod
    from mig_agent.kubectl.agents import Agents
    from mig_agent.migctl.answers import Answer, Found
    from mig_agent.migctl.nodes_page import StatusPage

PROGRAM = "kubectl mig"
NOUN = "node"
NAMESPACE = "mig-agent"
SELECTOR = "app.kubernetes.io/name=mig-agent"
_FORBIDDEN = 403
_FORMATS = ("text", "wide", "json")
_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS: tuple[Callable[[_Command], _Command], ...] = (
    click.option("--node", "nodes", metavar="NODE", multiple=True, help="Only this node. Repeatable."),
    click.option("-o", "--output", metavar="FORMAT", default="text", help="text (default), wide or json."),
    click.option("-n", "--namespace", metavar="NAME", default=NAMESPACE, show_default=True, help="Of the agents."),
    click.option("-l", "--selector", metavar="LABELS", default=SELECTOR, show_default=True, help="Of their pods."),
    click.option("--context", metavar="NAME", default="", help="Of the kubeconfig. Default: its current one."),
    click.option(
        "--kubeconfig", metavar="FILE", type=click.Path(path_type=Path), help="Default: KUBECONFIG, ~/.kube/config."
    ),
    click.option("--timeout", metavar="TIME", default="10s", show_default=True, help="For the answer of each node."),
)


def _options(function: _Command) -> _Command:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, invoke_without_command=True
)
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def cli(context: click.Context, /) -> None:
    """Show the GPUs of a cluster's nodes, their MIG instances, and who holds them.

    \b
      kubectl mig status               a map of every node, and what fits now
      kubectl mig status --node n1     of one node
      kubectl mig leases               every lease, with its node, GPU and slices
      kubectl mig queue                the requests that wait
      kubectl mig top                  memory and compute in use, by instance

    \b
    Exit codes: 0 done, 2 wrong usage, 4 a node or the cluster gives no answer.
    It needs the rights to list pods and to exec in pods of the agents' namespace.
    """  # noqa: D301 -- \b is click's mark for a paragraph that keeps its lines
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
@_options
def status(**options: Any) -> int:  # noqa: ANN401 -- see _OPTIONS
    """Show a map of every node, and what fits now on all together; with -o wide also leases and who waits."""
    from mig_agent.migctl import nodes_page  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    return _show(options, nodes_page.status_page, whole=True)


@cli.command()
@_options
def leases(**options: Any) -> int:  # noqa: ANN401 -- see _OPTIONS
    """Show every lease of every node."""
    from mig_agent.migctl import nodes_page  # noqa: PLC0415 -- as above

    return _show(options, nodes_page.leases_page)


@cli.command()
@_options
def queue(**options: Any) -> int:  # noqa: ANN401 -- see _OPTIONS
    """Show the requests that wait on every node, when they are likely to start, and what blocks them."""
    from mig_agent.migctl import nodes_page  # noqa: PLC0415 -- as above

    return _show(options, nodes_page.queue_page)


@cli.command()
@_options
@click.option("--watch", is_flag=True, help="Show it live, until q or Ctrl-C.")
@click.option("--interval", metavar="TIME", default="2s", show_default=True, help="With --watch: between readings.")
@click.option("--sort", type=click.Choice(ORDERS), default="memory", show_default=True, help="By what.")
@click.option("--filter", "words", metavar="TEXT", default="", help="Only instances that have this text in their row.")
def top(*, watch: bool, interval: str, sort: str, words: str, **options: Any) -> int:  # noqa: ANN401 -- see _OPTIONS
    """Show the memory and compute that are used on every instance of every node; unknown figures as `?`.

    With --watch the keys are those of `migctl top`: q quits, arrows and Page Up and Down scroll, s sorts, / filters.
    """
    seconds = parse_duration(interval)
    output = _format(options, "text", "json")
    agents = _agents(options)
    from mig_agent.migctl import nodes_top  # noqa: PLC0415 -- as above

    return nodes_top.show(
        lambda limit: _ask(agents, options, agents.top, limit),
        NOUN,
        View(order=sort, words=words),
        output=output,
        limit=agents.seconds,
        interval=seconds if watch and output != "json" and sys.stdout.isatty() else None,
    )


def run_command_line(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code. Nothing that a person types ends in a traceback."""
    try:
        code = cli.main(args=list(arguments), prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return failures.INTERRUPTED
    except BrokenPipeError:
        return failures.BROKEN_PIPE
    except (click.ClickException, UsageError) as error:
        return failures.report(error, json=failures.wants_json(arguments), program=PROGRAM)
    except (MigAgentError, OSError) as error:
        return failures.report(_reported(error), json=failures.wants_json(arguments), program=PROGRAM)
    return code if isinstance(code, int) else failures.DONE


def _reported(error: Exception) -> Exception:
    """Return the error in the form of a client that reached no agent, which failures reports with exit code 4."""
    from mig_agent.client import NoAgent  # noqa: PLC0415 -- as above

    words = getattr(error, "message", "") or str(error)
    hint = str(getattr(error, "hint", ""))
    if getattr(error, "status", 0) == _FORBIDDEN:
        hint = "ask an administrator of the cluster for the rights: to list pods there, and get and create on pods/exec"
    return NoAgent(words if words.startswith("cannot ") else f"cannot go on: {words}", hint)


def _show(options: dict[str, Any], page: StatusPage, *, whole: bool = False) -> int:
    output = _format(options, *_FORMATS)
    agents = _agents(options)
    answers = _ask(agents, options, agents.status, agents.seconds)
    from mig_agent.migctl import nodes_page  # noqa: PLC0415 -- as above

    return nodes_page.print_page(answers, page, NOUN, output=output, whole=whole)


def _format(options: dict[str, Any], *known: str) -> str:
    """Return the output format. Raises UsageError for one that is not known."""
    output = str(options["output"])
    if output not in known:
        raise UsageError(f"cannot print as {shown(output)}", f"-o takes {', '.join(known[:-1])} or {known[-1]}")
    return output


def _agents(options: dict[str, Any]) -> Agents:
    """Return the agents of the cluster. Raises UsageError and ConfigError."""
    seconds = parse_duration(options["timeout"])
    from mig_agent.kubectl.agents import Agents  # noqa: PLC0415 -- as above

    return Agents.connect(
        options["kubeconfig"],
        options["context"],
        namespace=options["namespace"],
        selector=options["selector"],
        seconds=seconds,
    )


def _ask(
    agents: Agents, options: dict[str, Any], ask: Callable[[AgentPod], Found], seconds: float
) -> tuple[Answer[Found], ...]:
    """Return the answer of every node that was asked for. Raises UsageError and KubeApiError."""
    from mig_agent.migctl.answers import ask_all  # noqa: PLC0415 -- as above

    pods = agents.pods()
    if not pods:
        raise UsageError(
            f"cannot find an agent: namespace {shown(agents.namespace)} has no pods with {shown(agents.selector)}",
            "give the namespace in which the chart is installed: -n NAMESPACE",
        )
    known = {each.node for each in pods}
    for node in options["nodes"]:
        if node not in known:
            near = failures.near_guess(node, known)
            hint = f"did you mean {near}?" if near else "see `kubectl mig status`"
            raise UsageError(f"cannot find an agent on node {shown(node)}", hint)
    chosen = [each for each in pods if not options["nodes"] or each.node in options["nodes"]]
    return ask_all(chosen, ask, seconds)
