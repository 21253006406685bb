"""The first moments of a program, before its modules are imported: interrupts, and files that are closed.

It imports nothing but what the interpreter has imported by then, so that hardly a moment passes before it runs: the
module `signal` is `_signal` with enums around it, and to import those takes longer than all that is done here.
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
    """From now on an interrupt ends the process at once and without a word, as long as it holds nothing.

    A KeyboardInterrupt would come in the middle of an import, and not everything that is imported lets it through.
    Where interrupts are ignored (nohup, a job in the background) they still are. The script `migctl` starts Python with
    interrupts blocked: one that came meanwhile is delivered here. Programs that are started later would inherit the
    mask, so it goes in any case.
    """
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _end)
    pthread_sigmask(SIG_UNBLOCK, (SIGINT,))


def raise_when_interrupted() -> None:
    """From now on an interrupt raises KeyboardInterrupt: there is something to be given back."""
    if getsignal(SIGINT) is _end:
        signal(SIGINT, default_int_handler)


def ignore_interrupts() -> None:
    """From now on nothing can be interrupted: the work is done, and the exit code is to say so."""
    signal(SIGINT, SIG_IGN)


def open_standard_files() -> None:
    """Daemons start programs without stdin, stdout or stderr, and the next file to be opened would be taken for it."""
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
