"""What the reference scheduler serves of a trace, beside what the planner alone would with all GPUs in one node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from placement_bench.contenders import AGENT
from placement_bench.mixed import MixedAgent, model, replay
from placement_bench.replay import RUNNERS
from placement_bench.rounds import Asked, made_up

from mig_agent.core.model import NodeView
from mig_agent.core.planning.plan import DEFAULT_POLICY
from support.agent import eventually
from support.placing import PATIENCE_SECONDS, Placing, placing
from support.standing import as_they_stand

MODELS = ("a100-40gb", "h100-80gb", "h100-80gb")


@pytest.fixture
def there() -> Iterator[Placing]:
    with placing(one=f"{MODELS[0]}:1", two=f"{MODELS[1]}:1", three=f"{MODELS[2]}:1") as made:
        yield made


def look(there: Placing) -> NodeView:
    """How the GPUs of all nodes stand."""
    statuses = []
    for node in there.agents:
        with there.client(node) as client:
            statuses.append(client.status())
    return as_they_stand(statuses, MODELS)


def end(there: Placing, name: str) -> None:
    """The pod goes, and its lease."""
    ((node, lease),) = there.leases_of(name)
    with there.client(node) as client:
        client.release(lease.id)
    del there.api.pods[name]


def test_nothing_is_lost_by_asking_node_by_node(there: Placing) -> None:
    """Scores are comparable between nodes and models: the best node's best place is the best of all."""
    rounds = made_up(90, 9, seed=3)
    there.start()
    served: dict[str, bool] = {}
    held: dict[str, Asked] = {}
    for number, arrivals in enumerate(rounds):
        for name in [name for name, asked in held.items() if asked.ends <= number]:
            end(there, name)
            del held[name]
        found = look(there)
        for asked in arrivals:
            there.pod(asked.name, **{f"memory_{asked.memory.lower()}": 1})

            def settled(name: str = asked.name) -> bool:
                return bool(there.api.node_of(name) or there.api.why(name))

            eventually(settled, f"{asked.name} is placed or told why not", PATIENCE_SECONDS)
            served[asked.name] = bool(there.api.node_of(asked.name))
            if served[asked.name]:
                held[asked.name] = asked
            else:
                del there.api.pods[asked.name]
                there.until_looked()  # or it is placed in the last moment, when the next round has made room
        # From how it stood, as the churn on a cluster compares it, which cannot count on the rounds before.
        assert replay(MixedAgent(found, DEFAULT_POLICY), [arrivals]) == held.keys() & {each.name for each in arrivals}
    there.check()
    assert not all(served.values())
    alone = RUNNERS[AGENT]([model(name) for name in MODELS], rounds)
    assert {name for name, is_served in served.items() if is_served} == alone
