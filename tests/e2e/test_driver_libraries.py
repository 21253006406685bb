"""The machine's own container toolkit, run in the machine's own file system by an agent that is in a container.

The toolkit is a script here: there is no NVIDIA driver to ask. That it finds only what is in that file system is real.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mig_agent.adapters.driver_libraries import DriverLibraries, Edits
from mig_agent.adapters.host import Host
from support.cluster import programs

LIBRARY = {"hostPath": "/usr/lib/libcuda.so.580", "containerPath": "/usr/lib/libcuda.so.580", "options": ["ro"]}


def test_the_toolkit_is_run_in_the_machines_own_root(tmp_path: Path) -> None:
    programs.ensure()
    machine = tmp_path / "machine"
    for folder in ("bin", "usr/bin", "usr/lib"):
        (machine / folder).mkdir(parents=True)
    (machine / "usr/lib/libcuda.so.580").touch()
    # A static program: what else the machine has is not in reach of it.
    shutil.copy("/bin/busybox", machine / "bin/busybox")
    (machine / "bin/sh").symlink_to("busybox")
    spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [], "containerEdits": {"mounts": [LIBRARY]}}
    (machine / "spec.json").write_text(json.dumps(spec))
    toolkit = machine / "usr/bin/nvidia-ctk"
    toolkit.write_text(
        '#!/bin/sh\n[ "$*" = "cdi generate --format=json" ] || exit 2\n'
        f"[ -e {tmp_path}/machine ] && exit 3\n/bin/busybox cat /spec.json\n"
    )
    toolkit.chmod(0o755)
    told: list[str] = []
    libraries = DriverLibraries(Host(machine), told.append, machine=machine)
    assert libraries.find() == Edits(mounts=(LIBRARY,)), told
    assert not told
