"""All policies by name, so that another process can be told which one to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mig_agent.core.planning.plan import DEFAULT_POLICY, Policy
from placement_bench import rules
from placement_bench.agent import AgentCluster, planner_rule
from placement_bench.arrivals import Arrivals
from placement_bench.clusters import IdleCluster, RepackedCluster, RuleCluster, by_rule, oldest_victims
from placement_bench.geometry import GeometryCluster
from placement_bench.simulation import Served, simulate

Runner = Callable[[int, Arrivals, int], Served]
"""Maps (GPUs, arrivals, warm-up) to what was served."""

AGENT = "this agent"
AGENT_8 = "this agent, c = 8"
"""For nodes where creating an instance is slow."""
BLIND = "this agent, c = 0 (blind RC)"
FIRST_FIT = "first fit, lowest start"
NOS = "nos-like"
SPREAD = "HAMi-like spread"
BINPACK = "HAMi-like binpack"
DRIVER = "best fit, driver order"
MFI = "MFI-like"
REPACKED = "free repacking"
REUSE_LOWEST = "reuse first, else lowest start"
REUSE_OLDEST = "reuse first, oldest victims, then RC"


def _agent(policy: Policy) -> Runner:
    return lambda gpus, arrivals, warm_up: simulate(AgentCluster(gpus, policy), arrivals, warm_up=warm_up)


def _rule(rule: Callable[[], rules.Rule]) -> Runner:
    return lambda gpus, arrivals, warm_up: simulate(RuleCluster(rule(), gpus), arrivals, warm_up=warm_up)


RUNNERS: Mapping[str, Runner] = {
    FIRST_FIT: _rule(rules.first_fit),
    NOS: lambda gpus, arrivals, warm_up: simulate(GeometryCluster(gpus), arrivals, warm_up=warm_up),
    SPREAD: _rule(rules.hami_spread),
    BINPACK: _rule(rules.hami_binpack),
    DRIVER: _rule(rules.driver),
    MFI: _rule(rules.mfi),
    AGENT: _agent(DEFAULT_POLICY),
    AGENT_8: _agent(Policy(creation_cost=8.0)),
    BLIND: _agent(Policy(creation_cost=0.0)),
    REPACKED: lambda gpus, arrivals, warm_up: simulate(RepackedCluster(gpus), arrivals, warm_up=warm_up),
    REUSE_LOWEST: lambda gpus, arrivals, warm_up: simulate(
        IdleCluster(gpus, by_rule(rules.first_fit())), arrivals, warm_up=warm_up
    ),
    REUSE_OLDEST: lambda gpus, arrivals, warm_up: simulate(
        IdleCluster(gpus, oldest_victims(planner_rule())), arrivals, warm_up=warm_up
    ),
}
