"""The node reboots: no container, no CDI file and no MIG instance is left, and the kubelet asks for nothing anew.

So nothing that a container was told before may be true for ever.
"""

from __future__ import annotations

import shutil

from mig_agent.client import NoAgent
from mig_agent.simulator import STATE_FILE, Simulator
from support.agent import eventually
from support.cluster import kubelet as kubelets
from support.cluster.failures import ClusterError
from support.cluster.pods import PROFILE, deployment, is_running
from support.cluster.space import PATIENCE_SECONDS, Pods, Space

A30 = f"{PROFILE}1g.6gb"
"""Of a GPU that keeps its MIG mode over a reboot."""
_SHIM = "containerd-shim"
"""As the kernel cuts the name of the process that looks after a container."""


def reboot(space: Space) -> None:
    """As the machine's power button does it, seen by what is on its disk."""
    cluster, node = space.cluster, space.cluster.node
    node.kill("kubelet")
    # Whatever runs in containers, the agent too; each line of the list is ID, PID, STATUS.
    tasks = [line.split() for line in node.run("ctr", "tasks", "list").splitlines()[1:]]
    shims = node.run("pgrep", "--exact", _SHIM).split()
    node.kill("containerd")
    for pid in [*shims, *(pid for _, pid, status in tasks if status == "RUNNING")]:
        node.run("sh", "-c", 'kill -KILL "$0" || true', pid)
    run = cluster.layout.private("/run")
    for path in (run / "cdi").glob("*"):
        path.unlink()
    for path in (run / "mig-agent").glob("*.sock*"):
        if path.is_dir():
            shutil.rmtree(path)  # the folder of a socket's lock
        else:
            path.unlink()
    Simulator(cluster.layout.private("/var/lib") / "mig-agent" / STATE_FILE).reboot()
    node.start("containerd")
    eventually(lambda: answers(space), "containerd answers", seconds=PATIENCE_SECONDS)
    node.start("kubelet")


def answers(space: Space) -> bool:
    try:
        space.cluster.node.run("ctr", "version")
    except ClusterError:
        return False
    return True


def test_pods_come_back_after_a_reboot(space: Space) -> None:
    """The kubelet admits its pods anew before any plugin can register, and fails them; their controller makes others.

    That is Kubernetes' own way with every device plugin. What counts here is that nothing of before is in their way.
    """
    path = f"/apis/apps/v1/namespaces/{space.name}/deployments"
    space.cluster.api.create(path, deployment("two", 2, {A30: 1}))

    def served(pods: Pods) -> set[str]:
        return {name for name in space.leases() if name in pods and is_running(pods[name])}

    space.until(lambda pods: len(served(pods)) == 2, "two pods run")
    before = {lease.id for lease in space.leases().values()}
    reboot(space)
    eventually(lambda: not before & agents_leases(space), "the leases of before have ended", seconds=PATIENCE_SECONDS)
    pods = space.until(lambda pods: len(served(pods)) == 2, "two pods run again", seconds=240, may_fail=True)
    devices = {}
    for name in served(pods):
        (devices[name],) = space.lease(name).devices
        assert space.visible(name) == [devices[name].uuid]
    assert len({device.uuid for device in devices.values()}) == 2
    assert len(space.leases()) == 2
    space.until(lambda _: kubelets.healthy(space.cluster)[A30] == 4, "the kubelet has all devices again", may_fail=True)
    # The numbers of a GPU that forgot its MIG mode are 0, and it says what to do.
    space.until(lambda _: space.allocatable(f"{PROFILE}7g.80gb") == 0, "it shows no H100", may_fail=True)
    space.agent.set_mig_mode(0, enable=True)
    space.until(lambda _: space.allocatable(f"{PROFILE}7g.80gb") == 1, "the H100 is there again", may_fail=True)


def agents_leases(space: Space) -> set[str]:
    """While the agent is away, those that it had."""
    try:
        return {lease.id for lease in space.status().leases}
    except NoAgent:
        return set()
