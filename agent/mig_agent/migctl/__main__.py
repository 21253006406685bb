"""The entry point of `migctl` and of `python -m mig_agent.migctl`."""

import gc
import os
import sys

try:
    from mig_agent import bootstrap
except KeyboardInterrupt:  # it could not yet see to that
    os._exit(130)

_FEW_COLLECTIONS = 100_000
_NOT_WHOLE = 127
"""Exit code where a library of the command line is missing, as of the script that starts this program."""


def main() -> None:
    """Run the command line of this process, and exit with its code.

    Start and end are kept short, since a person waits: no garbage collection while modules are imported, and no orderly
    shutdown of the interpreter and gRPC.
    """
    bootstrap.end_when_interrupted()
    code = bootstrap.INTERRUPTED
    try:
        gc.set_threshold(_FEW_COLLECTIONS)
        bootstrap.open_standard_files()
        code = _run()
        bootstrap.ignore_interrupts()
        sys.stderr.flush()
    except KeyboardInterrupt:  # in the moment between the end of the work and being able to ignore it
        bootstrap.ignore_interrupts()
    os._exit(code)


def _run() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 -- mig-agent-client is also for 3.10
        return _refuse("it needs Python 3.11 or newer", "the Python client works with this one")
    try:
        from mig_agent.migctl.cli import run_command_line  # noqa: PLC0415 -- see main
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        return _refuse("there is no click", "pip install 'mig-agent-client[migctl]'")
    return run_command_line(sys.argv[1:])


def _refuse(why: str, hint: str) -> int:
    """Report what is missing in an environment that has the distribution mig-agent-client, and return the exit code."""
    sys.stderr.write(f"migctl: cannot start: {why}. Hint: {hint}\n")
    return _NOT_WHOLE


if __name__ == "__main__":
    main()
