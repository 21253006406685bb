"""Pods placed by the reference scheduler on two nodes, which is killed with the agents in the midst of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import yaml

from mig_agent.client import ClientError
from mig_agent.client.answers import LeaseInfo
from support.cluster import installed, scheduling
from support.cluster import kubelet as kubelets
from support.cluster.api import Json
from support.cluster.cluster import Cluster
from support.cluster.pods import MEMORY, container, has_failed, is_bound, is_running, phase, pod, pod_spec
from support.cluster.space import Pods, Space
from support.figures import Table
from support.rounds import Asked, served_by_the_planner, trace

PODS = int(os.environ.get("SCHEDULER_PODS", "240"))
A_ROUND = 8
MODELS = ("a100-40gb", "h100-80gb")
"""Of the nodes n1 and n2."""
_LONG_SECONDS = 300.0
"""For what may wait until a killed container is started again."""
_LEAST_SHARE = 0.7
"""Of the pods that the planner alone would serve: far below what it is, far above what a defect would leave."""


@pytest.fixture(scope="module")
def scheduled(two_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with scheduling.installed_on(two_nodes, tmp_path_factory.mktemp("scheduler")):
        yield two_nodes


@dataclass(slots=True)
class Churn:
    """A trace that is replayed, and what has become of it so far."""

    space: Space
    held: dict[str, Asked] = field(default_factory=dict)
    """Pods that run."""
    promised: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    """Of those: the node, and the UUIDs that the scheduler was given for them."""
    served: dict[str, bool] = field(default_factory=dict)
    rejected: list[str] = field(default_factory=list)
    """Pods that the kubelet did not take, with its words."""

    def end(self, number: int) -> None:
        """Those that last no longer."""
        over = [name for name, asked in self.held.items() if asked.ends <= number]
        for name in over:
            self.space.cluster.api.delete(f"{self.space.path}/pods/{name}")
            del self.held[name], self.promised[name]
        self.space.until(lambda pods: not pods.keys() & set(over), "ended pods are gone", seconds=_LONG_SECONDS)

    def begin(self, arrivals: Sequence[Asked]) -> None:
        for asked in arrivals:
            resource = {f"{MEMORY}{asked.memory}": 1}
            self.space.create(pod(asked.name, [container(limits=resource)], schedulerName=scheduling.NAME))

    def settle(self, arrivals: Sequence[Asked], *, unplugged: bool) -> None:
        """Returns when each of them runs or is lost: was told that there is no room.

        `unplugged`: an agent was killed meanwhile. A pod that comes to its node in that moment is rejected by the
        kubelet, which has no device plugin then; it may be lost, as long as its lease is not.
        """
        names = [asked.name for asked in arrivals]
        pods = self.until(
            lambda pods: all(is_bound(pods[name]) or scheduling.was_told_why(pods[name]) for name in names),
            "each is bound, or told that there is no room",
            unplugged,
        )
        lost = [name for name in names if not is_bound(pods[name])]
        for name in lost:
            self.space.cluster.api.delete(f"{self.space.path}/pods/{name}")
        staying = [name for name in names if name not in lost]
        pods = self.until(
            lambda pods: all(is_running(pods[name]) or phase(pods[name]) == "Failed" for name in staying),
            "those that are bound run",
            unplugged,
        )
        rejected = [name for name in staying if has_failed(pods[name])]
        for name in rejected:
            self.rejected.append(f"{name}: {pods[name]['status'].get('message')}")
            self.space.cluster.api.delete(f"{self.space.path}/pods/{name}")
        self.until(lambda pods: not pods.keys() & {*lost, *rejected}, "those that are lost are gone", unplugged)
        for asked in arrivals:
            self.served[asked.name] = asked.name not in {*lost, *rejected}
            if self.served[asked.name]:
                self.held[asked.name] = asked
                found = pods[asked.name]
                self.promised[asked.name] = (found["spec"]["nodeName"], scheduling.promised_to(found))
                assert self.space.visible(asked.name) == scheduling.promised_to(found), self.space.explain(asked.name)

    def until(self, done: Callable[[Pods], object], what: str, unplugged: bool) -> Pods:
        return self.space.until(done, what, seconds=_LONG_SECONDS, may_fail=unplugged)

    def until_plugged(self) -> None:
        """Returns when no node shows more than its kubelet takes in, as one does for moments whose agent was killed."""

        def takes_in(node: str) -> bool:
            there = kubelets.healthy(self.space.cluster, node)
            shown = self.space.node(node)["status"]["allocatable"]
            return all(int(count) <= there[name] for name, count in shown.items() if name.startswith(MEMORY))

        self.space.until(lambda _: all(map(takes_in, self.space.agents)), "kubelets have their plugins", may_fail=True)

    def check(self) -> None:
        """Each pod that runs has the lease that was promised to it, and nothing else is leased."""
        self.space.until(
            lambda _: self._leased() == {name: [where] for name, where in self.promised.items()},
            f"exactly these are leased: {self.promised}",
            seconds=_LONG_SECONDS,
            may_fail=True,
        )
        uuids = [uuid for _, found in self.promised.values() for uuid in found]
        assert len(set(uuids)) == len(uuids), "an instance was given twice"

    def _leased(self) -> dict[str, list[tuple[str, list[str]]]]:
        found: dict[str, list[tuple[str, list[str]]]] = {}
        try:
            for node in self.space.agents:
                for lease in self.space.status(node).leases:
                    found.setdefault(_name(lease), []).append((node, [device.uuid for device in lease.devices]))
        except ClientError:
            return {}  # an agent that was killed is on its way back
        return found


def _name(lease: LeaseInfo) -> str:
    return lease.pod.name if lease.pod else lease.id


@pytest.mark.timeout(1500)
def test_churn(scheduled: Cluster, wide_space: Space, table: Table) -> None:
    rounds = trace(PODS, A_ROUND, seed=7)

    def both() -> None:
        scheduling.kill(scheduled)
        installed.kill_agent(scheduled, "n1")

    kills: dict[int, Callable[[], None]] = {
        len(rounds) // 4: lambda: scheduling.kill(scheduled),
        len(rounds) // 2: lambda: installed.kill_agent(scheduled, "n2"),
        3 * len(rounds) // 4: both,
    }
    churn = Churn(wide_space)
    for number, arrivals in enumerate(rounds):
        churn.end(number)
        # In the midst of it: while pods come, are placed and start.
        killing = threading.Thread(target=kills.get(number, lambda: None))
        killing.start()
        try:
            churn.begin(arrivals)
            churn.settle(arrivals, unplugged=number >= len(rounds) // 2 and number in kills)
        finally:
            killing.join()
        churn.until_plugged()
        churn.check()
    churn.end(len(rounds) + PODS)
    churn.check()
    planned = served_by_the_planner(rounds, MODELS)
    here, there = sum(churn.served.values()), sum(planned.values())
    told = [f"{here} of {PODS} on the cluster, {there} by the planner alone; {len(kills)} times something was killed"]
    table("pods served by the reference scheduler", "\n".join(told + churn.rejected))
    assert here >= _LEAST_SHARE * there


GANG = 9
"""More than either node has room for."""


def test_a_gang_over_both_nodes_runs_whole_or_not_at_all(scheduled: Cluster, wide_space: Space) -> None:
    jobs = f"/apis/batch/v1/namespaces/{wide_space.name}/jobs"
    scheduling.switch_to(scheduled, "gang.py")
    try:
        in_the_way = pod("whole", [container(limits={f"{MEMORY}80g": 1})], schedulerName=scheduling.NAME)
        wide_space.create(in_the_way)
        wide_space.until_running("whole")
        (job,) = yaml.safe_load_all((scheduling.EXAMPLE / "gang.yaml").read_text())
        job["spec"] |= {"completions": GANG, "parallelism": GANG}
        job["spec"]["template"]["metadata"]["annotations"]["mig-agent.io/gang-size"] = str(GANG)
        # The program of the example ends at once: then nobody could see them run together.
        job["spec"]["template"]["spec"] |= pod_spec([container(limits={f"{MEMORY}10g": 1})])
        scheduled.api.create(jobs, job)

        def members(pods: Pods) -> list[Json]:
            return [each for name, each in pods.items() if name.startswith("gang-")]

        def all_told(pods: Pods) -> bool:
            return len(members(pods)) == GANG and all(map(scheduling.was_told_why, members(pods)))

        wide_space.until(all_told, "each of the gang is told that there is no room for all")
        scheduled.api.delete(f"{wide_space.path}/pods/whole")
        scheduling.kill(scheduled)
        pods = wide_space.until(
            lambda pods: len(members(pods)) == GANG and all(map(is_running, members(pods))),
            "all of the gang run together",
            seconds=_LONG_SECONDS,
        )
        assert {each["spec"]["nodeName"] for each in members(pods)} == {"n1", "n2"}
        for each in members(pods):
            assert wide_space.visible(each["metadata"]["name"]) == scheduling.promised_to(each)
    finally:
        scheduled.api.delete(f"{jobs}/gang", propagationPolicy="Background")
        wide_space.until(lambda pods: not pods.keys() - {"whole"}, "they are gone", may_fail=True)
        scheduling.switch_to(scheduled, "scheduler.py")
