"""The entry point of `mig-agent` and of `python -m mig_agent`."""

import os

try:
    from mig_agent import bootstrap
except KeyboardInterrupt:  # no handler for it is installed yet
    os._exit(130)


def main() -> None:
    """Run the program and end the process."""
    bootstrap.end_when_interrupted()
    bootstrap.open_standard_files()
    from mig_agent.program import run  # noqa: PLC0415 -- an interrupt in the middle of it must not end in a traceback

    run()


if __name__ == "__main__":
    main()
