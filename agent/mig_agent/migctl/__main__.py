"""`migctl`, and `python -m mig_agent.migctl`."""

import gc
import os
import sys

try:
    from mig_agent import bootstrap
except KeyboardInterrupt:  # it could not yet see to that
    os._exit(130)

_SELDOM = 100_000


def main() -> None:
    """Runs the command line of this process, and exits with its code.

    A person waits for it: objects are not searched for cycles while modules are imported, and the interpreter and gRPC
    are not taken down piece by piece at the end.
    """
    bootstrap.end_when_interrupted()
    code = bootstrap.INTERRUPTED
    try:
        gc.set_threshold(_SELDOM)
        bootstrap.open_standard_files()
        from mig_agent.migctl.cli import run_command_line  # noqa: PLC0415 -- see above

        code = run_command_line(sys.argv[1:])
        bootstrap.ignore_interrupts()
        sys.stderr.flush()
    except KeyboardInterrupt:  # in the moment between the end of the work and being able to ignore it
        bootstrap.ignore_interrupts()
    os._exit(code)


if __name__ == "__main__":
    main()
