"""CDI files as a real containerd and runc take them, the driver's libraries among them."""

from __future__ import annotations

from pathlib import Path

from mig_agent.adapters.cdi import CdiFolder
from mig_agent.adapters.driver_libraries import DriverLibraries, Edits
from support.cdi import mig_device, simulated
from support.cluster import images
from support.cluster.cluster import Cluster

KIND = "example.com/mig"
"""Not the agent's own, which would remove the files as nobody's."""
NAMES = ("mig-1g.5gb.me-0", "mig-1g.5gb.me-1")
SCRIPT = "ls /dev/nvidia* /dev/nvidia-caps/*; env; cat /opt/library; ls -l /dev/nvidia-caps"


class Found(DriverLibraries):
    """What a toolkit wrote: a library and a hook, which the host has."""

    def __init__(self, touched: Path) -> None:
        library = {"hostPath": "/bin/busybox", "containerPath": "/opt/program", "options": ["ro", "nosuid", "bind"]}
        words = {
            "hostPath": str(touched.with_name("library")),
            "containerPath": "/opt/library",
            "options": ["ro", "bind"],
        }
        hook = {"hookName": "createContainer", "path": "/bin/busybox", "args": ["touch", "touch", str(touched)]}
        self.edits = Edits(mounts=(library, words), hooks=(hook,), variables=("FROM_TOOLKIT=1",))

    def find(self) -> Edits:
        return self.edits


def test_a_container_gets_what_the_files_say(bare_cluster: Cluster, tmp_path: Path) -> None:
    """Two files for one container; a device that is none on this machine; libraries in one of them."""
    tmp_path.chmod(0o755)
    (tmp_path / "library").write_text("a library of the driver\n")
    simulator, host = simulated(tmp_path)
    # Where the node's containerd looks: in its own /run.
    place = bare_cluster.layout.private("/run") / "cdi"
    folder = CdiFolder(place, KIND, host, simulated=True, libraries=Found(tmp_path / "hooked"))
    try:
        for number, name in enumerate(NAMES):
            folder.write(
                name, [mig_device(simulator)], {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, with_libraries=not number
            )
        devices = [part for name in NAMES for part in ("--device", folder.qualified(name))]
        own = f"/{bare_cluster.layout.cgroup}/cdi"
        said = bare_cluster.node.run(
            *("ctr", "run", "--rm", "--cgroup", own, *devices, images.BUSYBOX, "cdi", "sh", "-c", SCRIPT)
        )
    finally:
        for name in NAMES:
            folder.remove(name)
    lines = said.splitlines()
    nodes = [line for line in lines if line.startswith("/dev/nvidia")]
    assert {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} < set(nodes)
    # GPU instances 13 and 11, and their compute instances.
    caps = {f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (120, 121, 102, 103)}
    assert caps == {line for line in nodes if "nvidia-cap" in line and line[-1].isdigit()}
    assert "CUDA_VISIBLE_DEVICES=MIG-a,MIG-b" in lines
    assert "FROM_TOOLKIT=1" in lines
    assert "a library of the driver" in lines
    modes = [line for line in lines if line.endswith("nvidia-cap120")]
    assert any(line.startswith("cr--r--r--") and "240, 120" in line for line in modes)
    assert (tmp_path / "hooked").exists()
