"""The ways in which this machine can enforce memory limits of shares."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from mig_agent.adapters.shares.enforcer import Enforcer
from mig_agent.adapters.shares.mps_enforcer import MpsEnforcer
from mig_agent.config import Settings
from mig_agent.daemon.hardware import Hardware

_LONGEST_WAIT_SECONDS = 10.0


def share_enforcers(settings: Settings, hardware: Hardware) -> tuple[Enforcer, ...]:
    """Return the ways, the preferred one first. Touches neither the driver nor the disk."""
    root = hardware.host.root
    on_path = os.environ.get("PATH", os.defpath)
    mps = MpsEnforcer(
        _mps_folder(settings, hardware),
        hardware.driver,
        search_path=f"{root / 'usr/bin'}:{on_path}" if settings.simulate else on_path,
        # The end of a share waits at most twice for a daemon that hangs, and its GPU's thread with it.
        deadline_seconds=min(_LONGEST_WAIT_SECONDS, settings.call_deadline / 3),
    )
    return (mps,)


def _mps_folder(settings: Settings, hardware: Hardware) -> Path:
    """Return a folder of this agent alone: another one on this machine has other shares with the same numbers."""
    own = hashlib.sha256(os.fsencode(settings.state_dir.absolute())).hexdigest()[:8]
    run_folder = hardware.host.root / "run" if settings.simulate else hardware.lock_folder.parent
    return run_folder / "mps" / own
