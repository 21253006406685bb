"""The program `mig-agent`: serve, demo, version."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from mig_agent import __version__
from mig_agent.config.flags import GroupedCommand, settings_flags, texts_of
from mig_agent.config.load import load
from mig_agent.core.errors import ConfigError

_USAGE = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Turns requests for GPU memory into MIG instances, on this node."""


@main.command(cls=GroupedCommand, params=settings_flags())
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="MIG_AGENT_CONFIG",
    metavar="FILE",
    help="Read settings from this YAML file first; flags and MIG_AGENT_ variables win over it.",
)
def serve(config: Path | None, **flags: object) -> None:
    """Serve until SIGTERM: take requests, partition GPUs, keep leases.

    On a machine with no GPU: mig-agent serve --simulate h100-80gb:2 --state-dir D --listen unix:///tmp/agent.sock
    """
    try:
        settings = load(config, texts_of(flags))
    except ConfigError as error:
        click.echo(f"mig-agent: {error.message}", err=True)
        if error.hint:
            click.echo(f"  hint: {error.hint}", err=True)
        sys.exit(_USAGE)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines are no JSON, and ours say the same in words
    from mig_agent.daemon.serve import serve as until_stopped  # noqa: PLC0415 -- `--help` must not wait for gRPC

    until_stopped(settings)


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(f"mig-agent {__version__}")


@main.command()
@click.option("--fast", is_flag=True, help="Do not pause between the steps.")
def demo(*, fast: bool) -> None:
    """Show what the agent does, over simulated GPUs; takes half a minute and leaves nothing behind."""
    from mig_agent.demo import show  # noqa: PLC0415 -- as above

    sys.exit(show(fast=fast))


if __name__ == "__main__":
    main(prog_name="mig-agent")
