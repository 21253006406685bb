"""The ways in which this machine can enforce memory limits of shares."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from mig_agent.adapters.shares.cgroup import CgroupEnforcer
from mig_agent.adapters.shares.enforcer import Enforcer
from mig_agent.adapters.shares.mps_enforcer import MpsEnforcer
from mig_agent.config import Settings
from mig_agent.daemon.hardware import Hardware

_LONGEST_WAIT_SECONDS = 10.0


def share_enforcers(settings: Settings, hardware: Hardware) -> tuple[Enforcer, ...]:
    """Return the ways, the preferred one first. Touches neither the driver nor the disk."""
    root = hardware.host.root
    on_path = os.environ.get("PATH", os.defpath)
    # The end of a share waits at most twice for what hangs, and its GPU's thread with it.
    deadline = min(_LONGEST_WAIT_SECONDS, settings.call_deadline / 3)
    own = _own_name(settings)
    mps = MpsEnforcer(
        _mps_folder(settings, hardware) / own,
        hardware.driver,
        search_path=f"{root / 'usr/bin'}:{on_path}" if settings.simulate else on_path,
        deadline_seconds=deadline,
    )
    cgroups = CgroupEnforcer(hardware.driver, hardware.host, own, grace_seconds=deadline, deadline_seconds=deadline / 2)
    return (cgroups, mps)


def _own_name(settings: Settings) -> str:
    """Return a name of this agent alone: another one on this machine has other shares with the same numbers."""
    return hashlib.sha256(os.fsencode(settings.state_dir.absolute())).hexdigest()[:8]


def _mps_folder(settings: Settings, hardware: Hardware) -> Path:
    return (hardware.host.root / "run" if settings.simulate else hardware.lock_folder.parent) / "mps"
