"""Becomes the command of `migctl run`. Started by path as a process of its own, with nothing of the package imported.

The launcher itself must do nothing between fork and exec, since gRPC has threads there. So it is done here: ask the
kernel to kill the command when the launcher dies. The agent then ends the lease at once, and the instance may be leased
to somebody else the next moment; a CUDA process that starts late would run on it.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before anything else: no traceback for a signal that comes early

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
COULD_NOT_RUN = 125


def main(launcher: int, command: list[str]) -> int:
    """Replace this process by the command; return the exit code if that fails."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before it was asked for
        return COULD_NOT_RUN
    # The interpreter ignores these two, and ignored signals stay ignored over exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 -- running the command is what this is for
    except OSError as error:
        print(f"migctl: cannot run {command[0]}: {error.strerror or error}", file=sys.stderr)
        return COULD_NOT_RUN


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
