"""`mig-agent replay`: makes the recorded plans of a bundle again, and compares them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mig_agent import __version__
from mig_agent.adapters.plain_files import read_plain
from mig_agent.bundle import archive
from mig_agent.bundle.contents import RECORDING
from mig_agent.core.errors import UsageError
from mig_agent.core.planning.plan import Plan
from mig_agent.core.planning.recording import Recording, describe, from_json, replay
from mig_agent.core.quantities import counted
from mig_agent.core.texts import visible


def read_recording(path: Path) -> Recording:
    """Return the recording of a bundle, or of a file recording.json. Raises UsageError."""
    try:
        if archive.is_archive(path):
            text = archive.read(path, RECORDING)
        else:
            text = read_plain(path, archive.MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no bundle"
        raise UsageError(f"cannot read {path}: {why}", "give a file that `migctl bundle` has written") from error
    return from_json(text, f"the recording of {path}")


def replay_and_report(path: Path, echo: Callable[[str], None], *, verbose: bool) -> bool:
    """Plan again what a bundle has recorded, and report differences; return True if there are none. Raises UsageError.

    `verbose` also shows the plans that are identical.
    """
    recording = read_recording(path)
    try:
        return _report(recording, lambda line: echo(visible(line)), verbose=verbose)  # others wrote the names in it
    except (AssertionError, AttributeError, TypeError, LookupError, ArithmeticError, ValueError) as error:
        raise UsageError(
            f"cannot replay {path}: its recording is not as an agent writes it", "make the bundle again"
        ) from error


def _report(recording: Recording, show: Callable[[str], None], *, verbose: bool) -> bool:
    leases = counted(len(recording.view.leases), "lease")
    gpus = counted(len(recording.view.gpus), "GPU")
    show(f"{recording.view.node}, revision {recording.view.revision}: {gpus}, {leases}")
    show(f"recorded by mig-agent {recording.version}, replayed by {__version__}")
    planned = refused = different = 0
    for each in replay(recording):
        if isinstance(each.recorded.outcome, Plan):
            planned += 1
        else:
            refused += 1
        if each.is_identical:
            if verbose:
                show(f"  same       {each.recorded.text}: {describe(each.outcome, recording.view)}")
            continue
        different += 1
        show(f"  different  {each.recorded.text}")
        show(f"    recorded  {describe(each.recorded.outcome, recording.view)}")
        show(f"    replayed  {describe(each.outcome, recording.view)}")
    whole = f"{counted(planned, 'plan')} and {counted(refused, 'refusal')}"
    show(f"{whole}: identical" if not different else f"{whole}: {different} of them different")
    return not different
