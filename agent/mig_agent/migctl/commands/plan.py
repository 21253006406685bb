"""`migctl plan`: what a request would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, asking_of, asking_options, verb
from mig_agent.migctl.printing import memory, place, print_json

if TYPE_CHECKING:
    from mig_agent.client.answers import NoPlan, Plan


@verb()
@asking_options
def plan(common: Common, *, dry_run: bool, **parameters: Any) -> int:  # noqa: ANN401, ARG001 -- what asking_options made; always dry
    """Say what a request would do, and change nothing. Takes what `request` takes."""
    output = common.wants()
    asking = asking_of(parameters)
    with common.client() as client:
        return print_plan(client.plan(**asking), output)


def print_plan(outcome: Plan | NoPlan, output: str) -> int:
    """Prints what a dry run says. The exit code; a refusal is raised as one."""
    from mig_agent.client import Refused, shapes  # noqa: PLC0415 -- only where it is needed
    from mig_agent.client.answers import NoPlan  # noqa: PLC0415 -- the same

    if isinstance(outcome, NoPlan):
        raise Refused(
            reason=outcome.reason,
            message=outcome.message,
            hint=outcome.hint,
            retryable=outcome.retryable,
            blockers=outcome.blockers,
        )
    if output == "json":
        print_json(shapes.plan(outcome))
        return failures.DONE
    lines = [f"GPU {each.gpu_index}: {each.words}" for each in outcome.steps]
    lines += [
        f"you would get {each.profile} ({memory(each.memory_mib)}) on {place(each.gpu_index, each.placement)}"
        for each in outcome.devices
    ]
    lines += [f"note: {each}" for each in outcome.notes]
    lines.append(f"score {outcome.score:.3g} (lower is better)")
    print("\n".join(lines))
    return failures.DONE
