"""`migctl`, and `python -m mig_agent.migctl`."""

from __future__ import annotations

import gc
import os
import sys
from typing import NoReturn

_SELDOM = 100_000


def main() -> NoReturn:
    """Runs the command line of this process, and exits with its code.

    A person waits for it: objects are not searched for cycles while modules are imported, and the interpreter and gRPC
    are not taken down piece by piece at the end.
    """
    gc.set_threshold(_SELDOM)
    from mig_agent.migctl.cli import run_command_line  # noqa: PLC0415 -- see above

    code = run_command_line(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
