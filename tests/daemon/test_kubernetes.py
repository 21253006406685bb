"""How a node shows what it can give, where nothing says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from mig_agent.config import load
from mig_agent.daemon.kubernetes import advertised_by


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("said", ["", "device-plugin", "node-status", "none"])
def test_a_device_plugin_is_the_default_where_there_is_a_kubelet(tmp_path: Path, said: str, *, there: bool) -> None:
    folder = tmp_path / "kubelet"
    if there:
        folder.mkdir()
    flags = {"kubernetes": "yes", "kubelet_dir": str(folder), **({"advertise": said} if said else {})}
    assert advertised_by(load(flags=flags)) == (said or ("device-plugin" if there else "none"))
