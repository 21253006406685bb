"""The command line of `kubectl mig`: its commands, their options, and the exit code for each way to end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mig_agent import __version__
from mig_agent.core.errors import MigAgentError, UsageError
from mig_agent.core.quantities import parse_duration, shown
from mig_agent.migctl import failures
from mig_agent.migctl.printing import can_unicode, print_json, print_whole, wants_color

if TYPE_CHECKING:
    from mig_agent.kubectl.answers import NodeAnswer
    from mig_agent.migctl.status_page import Page

PROGRAM = "kubectl mig"
NAMESPACE = "mig-agent"
SELECTOR = "app.kubernetes.io/name=mig-agent"
_FORBIDDEN = 403
_WIDEST_MAP = 120
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
    from mig_agent.kubectl import cluster_page  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    return _show(options, cluster_page.status_page, whole=True)


@cli.command()
@_options
def leases(**options: Any) -> int:  # noqa: ANN401 -- see _OPTIONS
    """Show every lease of every node."""
    from mig_agent.kubectl import cluster_page  # noqa: PLC0415 -- as above

    return _show(options, cluster_page.leases_page)


@cli.command()
@_options
def queue(**options: Any) -> int:  # noqa: ANN401 -- see _OPTIONS
    """Show the requests that wait on every node, when they are likely to start, and what blocks them."""
    from mig_agent.kubectl import cluster_page  # noqa: PLC0415 -- as above

    return _show(options, cluster_page.queue_page)


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


def _show(options: dict[str, Any], page: Callable[..., str], *, whole: bool = False) -> int:
    output = options["output"]
    if output not in _FORMATS:
        raise UsageError(f"cannot print as {shown(output)}", "-o takes text, wide or json")
    answers = _ask(options)
    from mig_agent.kubectl import cluster_page  # noqa: PLC0415 -- as above

    if output == "json":
        print_json(cluster_page.encode(answers))
    else:
        print_whole(page(answers, _page(wide=output == "wide")))
        if not whole:
            sys.stderr.writelines(f"{each}\n" for each in cluster_page.troubles(answers))
    return failures.NO_AGENT if any(each.status is None for each in answers) else failures.DONE


def _page(*, wide: bool) -> Page:
    from mig_agent.migctl.status_page import Page  # noqa: PLC0415 -- as above

    return Page(
        width=min(shutil.get_terminal_size((80, 24)).columns, _WIDEST_MAP),
        color=wants_color(),
        unicode=can_unicode(),
        cut=sys.stdout.isatty() and not wide,
        leases=wide,
    )


def _ask(options: dict[str, Any]) -> tuple[NodeAnswer, ...]:
    """Return the answer of every node that was asked for. Raises UsageError, ConfigError and KubeApiError."""
    seconds = parse_duration(options["timeout"])
    from mig_agent.kubectl.agents import Agents  # noqa: PLC0415 -- as above
    from mig_agent.kubectl.answers import ask_nodes  # noqa: PLC0415 -- as above

    namespace = options["namespace"]
    agents = Agents.connect(
        options["kubeconfig"], options["context"], namespace=namespace, selector=options["selector"], seconds=seconds
    )
    pods = agents.pods()
    if not pods:
        raise UsageError(
            f"cannot find an agent: namespace {shown(namespace)} has no pods with {shown(options['selector'])}",
            "give the namespace in which the chart is installed: -n NAMESPACE",
        )
    known = {each.node for each in pods}
    for node in options["nodes"]:
        if node not in known:
            near = failures.near_guess(node, known)
            hint = f"did you mean {near}?" if near else "see `kubectl mig status`"
            raise UsageError(f"cannot find an agent on node {shown(node)}", hint)
    chosen = [each for each in pods if not options["nodes"] or each.node in options["nodes"]]
    return ask_nodes(chosen, agents.status, seconds)
