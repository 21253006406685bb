"""From a request to a plan: which GPU, which profile, which slices, which idle instances have to go.

Pure: the same function serves the agent, the dry run, the queue and the benchmark. `placement` and `board` hold the
policy for one GPU, `choosing` which profile serves, `finding` the search over GPUs, `together` and `packing` several
devices at once, `refusals` the words when nothing is found.
"""

from __future__ import annotations

from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.finding import NOTHING_EXCLUDED, NOTHING_RESERVED, find
from mig_agent.core.model import GpuUuid, NodeView, Request, Slot
from mig_agent.core.plan import Outcome
from mig_agent.core.policy import DEFAULT_POLICY, Policy
from mig_agent.core.refusals import explain


def plan(
    view: NodeView,
    request: Request,
    policy: Policy = DEFAULT_POLICY,
    now: float = 0.0,
    *,
    reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
    exclude: frozenset[Slot] = NOTHING_EXCLUDED,
) -> Outcome:
    """How this node would serve the request now, or why not.

    `reserved` are GPUs kept for somebody else, `exclude` slots that just failed and shall be neither used nor created.
    `now` is the wall clock in seconds: it tells people when a lease in the way will end.
    """
    if request.if_revision is not None and request.if_revision != view.revision:
        return Refusal(
            reason=Reason.REVISION_CHANGED,
            message=f"cannot go by revision {request.if_revision}: the node has changed and is at {view.revision}",
            hint="read the status again and decide anew",
            revision=view.revision,
        )
    found = find(view, request, policy, reserved=reserved, exclude=exclude)
    return explain(view, request, policy, now, reserved=reserved, exclude=exclude) if found is None else found
