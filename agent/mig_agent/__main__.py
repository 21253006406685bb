"""`mig-agent`, and `python -m mig_agent`."""

import os

try:
    from mig_agent import bootstrap
except KeyboardInterrupt:  # it could not yet see to that
    os._exit(130)


def main() -> None:
    """Runs the program and ends the process."""
    bootstrap.end_when_interrupted()
    bootstrap.open_standard_files()
    from mig_agent.program import run  # noqa: PLC0415 -- an interrupt in the middle of it must not end in a traceback

    run()


if __name__ == "__main__":
    main()
