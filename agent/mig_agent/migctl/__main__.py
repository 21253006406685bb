"""`migctl`, and `python -m mig_agent.migctl`."""

from __future__ import annotations

import gc
import os
import sys
from typing import NoReturn

_SELDOM = 100_000
_INTERRUPTED = 130


def main() -> NoReturn:
    """Runs the command line of this process, and exits with its code.

    A person waits for it: objects are not searched for cycles while modules are imported, and the interpreter and gRPC
    are not taken down piece by piece at the end.
    """
    gc.set_threshold(_SELDOM)
    _open_what_is_closed()
    try:
        from mig_agent.migctl.cli import run_command_line  # noqa: PLC0415 -- see above

        code = run_command_line(sys.argv[1:])
    except KeyboardInterrupt:  # before anybody could deal with it
        code = _INTERRUPTED
    sys.stderr.flush()
    os._exit(code)


def _open_what_is_closed() -> None:
    """Daemons start programs without stdin, stdout or stderr, and the next file to be opened would be taken for it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


if __name__ == "__main__":
    main()
