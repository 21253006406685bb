"""The program `mig-agent`: serve, check, health, backup, restore, replay, demo, leave, version."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from mig_agent import __version__, bootstrap
from mig_agent.config.flags import GroupedCommand, settings_flags, texts_of
from mig_agent.config.load import Reading, read
from mig_agent.config.settings import DEFAULT_CONFIG
from mig_agent.core.errors import ConfigError, LedgerError, UsageError
from mig_agent.core.quantities import counted, parse_duration
from mig_agent.daemon.journal_stream import is_journal, with_priority

_NAME = "mig-agent"
_USAGE = 2


def _print_error(message: str, hint: str) -> None:
    _print_finding("error", message, hint, who=_NAME)


def _print_finding(level: str, message: str, hint: str, *, who: str = "") -> None:
    """Print one line to standard error, which begins with the program's name or with the level."""
    line = f"{who or level}: {message}{f'. Hint: {hint}' if hint else ''}"
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        click.echo(with_priority(line, level) if is_journal() else line, err=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="mig-agent %(version)s")
def program() -> None:
    """Turn requests for GPU memory into MIG instances, on this node."""


@program.command(cls=GroupedCommand, params=settings_flags())
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="MIG_AGENT_CONFIG",
    metavar="FILE",
    help="Read settings from this YAML file first; flags and MIG_AGENT_ variables win over it.",
)
def serve(config: Path | None, **flags: object) -> None:
    """Serve until SIGTERM: take requests, partition GPUs, keep leases. SIGHUP reads the configuration again.

    On a machine with no GPU: mig-agent serve --simulate h100-80gb:2 --state-dir /tmp/mig --listen unix:///tmp/mig/agent.sock
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # also before there is an event loop that logs it

    def read_again() -> Reading:
        return read(config, texts_of(flags))

    reading = read_again()
    if reading.settings is None:
        for problem in reading.problems:
            _print_error(problem.message, problem.hint)
        sys.exit(_USAGE)
    gc.disable()  # nearly all objects of the start stay; `daemon.serve` enables it again
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines are not JSON, and ours report the same
    from mig_agent.daemon.serve import serve as until_stopped  # noqa: PLC0415 -- `--help` must not wait for gRPC

    until_stopped(reading.settings, read_again)


def _is_absent(path: Path) -> bool:
    """Return True if there is no such file; False also where that cannot be seen, so that reading it says why."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


@program.command(short_help="Check the configuration without starting the agent.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="MIG_AGENT_CONFIG",
    metavar="FILE",
    help=f"The configuration to check.  [default: {DEFAULT_CONFIG} if it is there]",
)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="How to print the result.")
def check(config: Path | None, output: str) -> None:
    """Check the configuration without starting the agent; end with 0 if it can be used, else with 1.

    Finds all mistakes in the file and in MIG_AGENT_ variables at once. Warnings are about this machine and the user who
    checks, such as a certificate that cannot be read; they do not change the exit code.
    """
    from mig_agent.daemon.check import as_json, findings  # noqa: PLC0415 -- `--help` must not wait for it

    config = _usual(config)
    found = findings(read(config))
    errors = sum(each.is_error for each in found)
    if output == "json":
        click.echo(as_json(config, found))
        sys.exit(1 if errors else 0)
    for each in found:
        _print_finding("error" if each.is_error else "warning", each.problem.message, each.problem.hint)
    counts = [counted(errors, "error"), counted(len(found) - errors, "warning")]
    click.echo(f"{config or 'no configuration file, only the environment'}: {', '.join(counts)}")
    sys.exit(1 if errors else 0)


@program.command()
def version() -> None:
    """Print the version."""
    click.echo(f"mig-agent {__version__}")


@program.command(short_help="Tell whether the agent on this machine is ready, for probes.")
@click.option("--address", metavar="ADDRESS", help="Where the agent is.  [default: MIG_AGENT_ADDRESS, or its socket]")
@click.option("--live", is_flag=True, help="Also while it starts or stops: whether it answers at all.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    metavar="SECONDS",
    help="How long to wait for an answer.  [default: 5]",
)
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="How long to wait until it is ready.  [default: 0]",
)
def health(address: str | None, *, live: bool, timeout: float, wait: float) -> None:
    """End with 0 if the agent on this machine is ready, else say why not and end with 1: for probes.

    It is ready when it serves; as a device plugin of Kubernetes, when the kubelet also knows what it offers.
    """
    from mig_agent.client.addresses import resolve  # noqa: PLC0415 -- `--help` must not wait for gRPC
    from mig_agent.client.channels import Tls  # noqa: PLC0415 -- as above
    from mig_agent.client.errors import NoAgent  # noqa: PLC0415 -- as above
    from mig_agent.client.health import Health, health_of  # noqa: PLC0415 -- as above

    try:
        found = health_of(resolve(address), Tls.from_environment(), seconds=timeout, patience=0.0 if live else wait)
    except UsageError as error:
        _print_error(error.message, error.hint)
        sys.exit(_USAGE)
    except NoAgent as error:
        _print_error(error.message, error.hint)
        sys.exit(1)
    if found is Health.READY or live:
        return
    if found is Health.SERVES:
        _print_error("cannot call the agent ready: the kubelet does not know its resources yet", "see the agent's log")
    else:
        _print_error("cannot call the agent ready: it starts or stops", "--live asks only whether it answers")
    sys.exit(1)


@program.command(short_help="Show what the agent does, over simulated GPUs.")
@click.option("--fast", is_flag=True, help="Do not pause between the steps.")
def demo(*, fast: bool) -> None:
    """Show what the agent does, over simulated GPUs; takes about 15 seconds and leaves nothing behind."""
    from mig_agent.demo import show  # noqa: PLC0415 -- as above

    bootstrap.raise_when_interrupted()
    sys.exit(show(fast=fast))


def _usual(config: Path | None) -> Path | None:
    """Return the configuration that was named, else the one that the service reads if it is there."""
    return DEFAULT_CONFIG if config is None and not _is_absent(DEFAULT_CONFIG) else config


_CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="MIG_AGENT_CONFIG",
    metavar="FILE",
    help=f"The agent's settings, for its state_dir.  [default: {DEFAULT_CONFIG} if it is there]",
)
_STATE_DIR = click.option("--state-dir", metavar="DIR", help="Where the agent keeps its state.")


@program.command(short_help="Copy the ledger into one file, consistent and checked.")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--force", is_flag=True, help="Replace the file if there is one.")
@_STATE_DIR
@_CONFIG
def backup(file: Path, config: Path | None, state_dir: str | None, *, force: bool) -> None:
    """Copy the ledger into one file, consistent and checked, while the agent runs or not.

    Keep the tokens' key, token.key in the same folder, with it. Without --state-dir, refused where the running agent
    keeps its ledger elsewhere.
    """
    from mig_agent.adapters.ledger.backup import back_up  # noqa: PLC0415 -- as above
    from mig_agent.daemon.ledger_choice import choose_ledger  # noqa: PLC0415 -- as above

    try:
        ledger = choose_ledger(_usual(config), state_dir, "back up")
        leases = back_up(ledger, file, force=force)
    except ConfigError as error:
        _print_error(error.message, error.hint)
        sys.exit(1)
    except LedgerError as error:
        _print_error(str(error), "")
        sys.exit(1)
    if not leases:
        _print_finding("warning", f"{ledger} has no leases", "name another with --state-dir if there should be some")
    click.echo(f"backed up {ledger}, {counted(leases, 'lease')}, to {file}")


@program.command(short_help="Put a backup of the ledger in its place.")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@_STATE_DIR
@_CONFIG
def restore(file: Path, config: Path | None, state_dir: str | None) -> None:
    """Put a backup of the ledger in its place, while the agent is stopped.

    The ledger that is there is kept aside. Leases of the backup stand; instances that it does not account for are left
    alone until an administrator adopts them, as leases were given and ended since.
    """
    from mig_agent.adapters.filelock import LockedError, lock_state_directory  # noqa: PLC0415 -- as above
    from mig_agent.adapters.ledger.backup import restore as put_back  # noqa: PLC0415 -- as above
    from mig_agent.daemon.ledger_choice import check_state_directory, choose_ledger  # noqa: PLC0415 -- as above

    try:
        ledger = choose_ledger(_usual(config), state_dir, "restore")
        check_state_directory(ledger, "restore")  # before the lock, which makes it
        with lock_state_directory(ledger.parent):
            leases, aside = put_back(ledger, file)
    except (LockedError, ConfigError) as error:
        _print_error(error.message, error.hint)
        sys.exit(1)
    except LedgerError as error:
        _print_error(str(error), "")
        sys.exit(1)
    former = f"the former ledger is kept as {aside}" if aside.exists() else "there was no ledger before"
    click.echo(f"restored {ledger}, {counted(leases, 'lease')}, from {file}; {former}")
    click.echo("start the agent; `migctl status` says what is left to do")


@program.command(short_help="Make the plans of a bundle again, and compare them.")
@click.argument("bundle", type=click.Path(path_type=Path), metavar="BUNDLE")
@click.option("-v", "--verbose", is_flag=True, help="Also show the plans that are the same.")
def replay(bundle: Path, *, verbose: bool) -> None:
    """Make the plans of a bundle (`migctl bundle`) again, with this version's planner, and compare them.

    What is planned again: a request for each profile and size that the node offers, and those that waited, on the node
    as it was when the bundle was made. Ends with 0 if all plans and refusals are identical, else with 1.
    """
    from mig_agent.bundle.replaying import replay_and_report  # noqa: PLC0415 -- `--help` must not wait for it

    try:
        identical = replay_and_report(bundle, click.echo, verbose=verbose)
    except UsageError as error:
        _print_error(error.message, error.hint)
        sys.exit(_USAGE)
    sys.exit(0 if identical else 1)


@program.command(short_help="Uninstall from a Kubernetes cluster.")
@click.option("--daemon-set", metavar="NAME", help="The DaemonSet that runs the agents.")
@click.option("--namespace", metavar="NAME", help="Where it is.")
@click.option("--node", metavar="NAME", help="Only clean this node, where no agent runs that could do it.")
@click.option("--timeout", default="2m", show_default=True, metavar="DURATION", help="How long to wait for its pods.")
@click.option(
    "--kubeconfig", type=click.Path(path_type=Path), metavar="FILE", help="Without it: the service account of the pod."
)
def leave(
    daemon_set: str | None, namespace: str | None, node: str | None, timeout: str, kubeconfig: Path | None
) -> None:
    """Uninstall from a Kubernetes cluster: delete the DaemonSet and wait until its agents have left their nodes clean.

    The Helm chart runs this before it deletes anything else. Leases of pods that run, and their instances, stay. With
    --node only labels, numbers and the condition of one node are taken back, after an agent that could not.
    """
    if node is not None and daemon_set is None and namespace is None:
        from mig_agent.daemon.uninstall import clean  # noqa: PLC0415 -- `--help` must not wait for it

        bootstrap.raise_when_interrupted()
        sys.exit(clean(node, kubeconfig))
    if node is not None or daemon_set is None or namespace is None:
        _print_error("cannot tell what to leave", "give --daemon-set and --namespace, or --node alone")
        sys.exit(_USAGE)
    try:
        seconds = parse_duration(timeout)
    except UsageError as error:
        _print_error(error.message, error.hint)
        sys.exit(_USAGE)
    from mig_agent.daemon.uninstall import uninstall  # noqa: PLC0415 -- as above

    bootstrap.raise_when_interrupted()
    sys.exit(uninstall(namespace, daemon_set, seconds, kubeconfig))


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program and end the process. A mistake on the command line gives one line, as with migctl."""
    try:
        code = program.main(arguments, _NAME, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(_USAGE)
    except click.ClickException as error:
        from mig_agent.migctl.failures import message_and_hint  # noqa: PLC0415 -- only where it is needed

        _print_error(*message_and_hint(error, _NAME))
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(bootstrap.INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)
