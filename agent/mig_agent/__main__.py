"""`mig-agent`, and `python -m mig_agent`."""

from mig_agent import starting


def main() -> None:
    """Runs the program and ends the process."""
    starting.end_when_interrupted()
    starting.open_standard_files()
    from mig_agent.program import run  # noqa: PLC0415 -- an interrupt in the middle of it must not end in a traceback

    run()


if __name__ == "__main__":
    main()
