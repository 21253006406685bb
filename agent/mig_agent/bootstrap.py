"""Setup before a program's modules are imported: interrupts, and closed standard files.

It imports only what the interpreter has already imported, so that it runs almost at once: the module `signal` is
`_signal` with enums around it, and to import those takes longer than everything that is done here.
"""

from __future__ import annotations

import os
import sys
from _signal import (  # type: ignore[import-not-found]  # typeshed has none
    SIG_IGN,
    SIG_UNBLOCK,
    SIGINT,
    default_int_handler,
    getsignal,
    pthread_sigmask,
    signal,
)

INTERRUPTED = 130


def end_when_interrupted() -> None:
    """Make interrupts end the process at once and silently, for as long as it holds nothing that must be released.

    A KeyboardInterrupt would come in the middle of an import, and not everything that is imported lets it through. If
    interrupts are ignored (nohup, a job in the background) they still are. The script `migctl` starts Python with
    interrupts blocked: one that was sent meanwhile is delivered here. Programs that are started later would inherit the
    mask, so it is removed in any case.
    """
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _end)
    pthread_sigmask(SIG_UNBLOCK, (SIGINT,))


def raise_when_interrupted() -> None:
    """Make interrupts raise KeyboardInterrupt, since there is something to be released."""
    if getsignal(SIGINT) is _end:
        signal(SIGINT, default_int_handler)


def ignore_interrupts() -> None:
    """Ignore interrupts: the work is done, and the exit code must say so."""
    signal(SIGINT, SIG_IGN)


def open_standard_files() -> None:
    """Open closed standard files on /dev/null: the next opened file would get their number, and be used as one.

    Daemons start programs without stdin, stdout or stderr.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def _end(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)
