"""`migctl completion`: prints the completion script for a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown
from mig_agent.migctl import failures
from mig_agent.migctl.options import completer_of
from mig_agent.migctl.printing import print_whole


@click.command(short_help="Print what makes a shell complete commands and options.")
@click.argument("shell", metavar="bash|zsh|fish", shell_complete=completer_of("shell"))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print what makes a shell complete commands, options, leases, profiles, GPUs and files.

    \b
      bash: source <(migctl completion bash)
      zsh:  source <(migctl completion zsh)
      fish: migctl completion fish | source
    """  # noqa: D301 -- \b is click's mark for a paragraph that keeps its lines
    found = get_completion_class(shell) if shell in {"bash", "zsh", "fish"} else None
    if found is None:
        raise UsageError(f"cannot complete in {shown(shell)}", "write bash, zsh or fish")
    print_whole(found(context.find_root().command, {}, "migctl", "_MIGCTL_COMPLETE").source())
    return failures.DONE
