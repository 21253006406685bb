"""The entry point of `kubectl-mig`, which kubectl finds in PATH as `kubectl mig`."""

import os
import sys

try:
    from mig_agent import bootstrap
except KeyboardInterrupt:  # no handler for it is installed yet
    os._exit(130)


def main() -> None:
    """Run the command line of this process, and exit with its code.

    The interpreter is not shut down in an orderly way: threads whose nodes do not answer would hold it up.
    """
    bootstrap.end_when_interrupted()  # it changes nothing, so Ctrl-C may end it anywhere
    bootstrap.open_standard_files()
    from mig_agent.kubectl.cli import run_command_line  # noqa: PLC0415 -- an interrupt in it must not show a traceback

    code = run_command_line(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
