"""Nodes of a cluster as `kubectl mig` gets them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mig_agent.client.types import (
    Available,
    Status,
    Waiting,
)
from mig_agent.kubectl.agent_pods import AgentPod
from mig_agent.migctl.answers import Answer
from support.answers import GPU, LEASE


@pytest.fixture
def node() -> Status:
    """A node with a GPU, of which alice has a slice, and which bob waits for."""
    return Status(
        node="n1",
        revision=7,
        gpus=(GPU,),
        leases=(replace(LEASE, unused=False),),
        queue=(Waiting(request_id="r", holder="bob", tenant="", priority=0, position=1, since=0.0, wants="7g.80gb"),),
        started_at=0.0,
        ledger_error="",
        version="1",
        driver_version="580",
        strict_fifo=False,
        available=(
            Available(profile="1g.10gb", memory_mib=9984, count=6),
            Available(profile="3g.40gb", memory_mib=40448, count=1),
        ),
    )


@pytest.fixture
def answers(node: Status) -> tuple[Answer[Status], ...]:
    """Two nodes that answer, and one that does not."""
    other = replace(
        node,
        node="n2",
        gpus=(replace(node.gpus[0], model="NVIDIA A100-SXM4-40GB", instances=()),),
        leases=(replace(node.leases[0], id="l2", holder="carol", unused=True),),
        queue=(),
        available=(
            Available(profile="1g.5gb", memory_mib=4864, count=7),
            Available(profile="1g.10gb", memory_mib=9856, count=4),
        ),
    )
    return (
        Answer(AgentPod(node="n1", name="mig-agent-1"), node),
        Answer(AgentPod(node="n2", name="mig-agent-2"), other),
        Answer(AgentPod(node="n3", name="mig-agent-3"), trouble="its agent's pod is Pending (ErrImagePull)"),
    )
