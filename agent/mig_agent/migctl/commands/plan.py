"""`migctl plan`: shows what a request would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mig_agent.core.errors import UsageError
from mig_agent.migctl import failures
from mig_agent.migctl.gpu_names import of_model
from mig_agent.migctl.options import Common, asking_of, asking_options, verb
from mig_agent.migctl.printing import device_words, print_json
from mig_agent.migctl.wait_words import basis, likely_start

if TYPE_CHECKING:
    from mig_agent.client import Client
    from mig_agent.client.request_args import RequestArgs
    from mig_agent.client.types import NoPlan

_WITHOUT_EFFECT = frozenset({"dry_run", "wait", "priority", "ttl", "pid", "request_id", "name"})
"""Options of a request that change no plan: taken, so that `request` can be replaced by `plan`, and not in the help."""


@verb(hidden_options=_WITHOUT_EFFECT, other_help={"explain": "Also what was weighed, and what blocks which GPU."})
@asking_options
def plan(common: Common, *, dry_run: bool, explain: bool, **parameters: Any) -> int:  # noqa: ANN401, ARG001 -- what asking_options made; always dry
    """Say what a request would do, and change nothing. Takes all options of `request`.

    With --explain also every place that was weighed with what it wastes and costs, the best first, and what blocks the
    other GPUs and who holds that.
    """
    output = common.wants()
    asking = asking_of(parameters)
    with common.client() as client:
        asking = of_model(client, asking, parameters["gpu_model"])
        return print_plan(client, asking, output, explain=explain)


def check_explain(*, dry_run: bool, explain: bool) -> None:
    """Raise UsageError if --explain is given without --dry-run."""
    if explain and not dry_run:
        raise UsageError(
            "cannot explain what is done at once: --explain goes with --dry-run", "or ask first: migctl plan --explain"
        )


def print_plan(client: Client, asking: RequestArgs, output: str, *, explain: bool) -> int:
    """Print a dry run of the request and return the exit code. Raises Refused if it would be refused."""
    from mig_agent.client import Refused, to_json, types  # noqa: PLC0415 -- only where it is needed

    outcome = client.plan(explain=explain, estimate=True, **asking)
    explanation = list(map(failures.one_line, outcome.explanation))
    if isinstance(outcome, types.NoPlan):
        if explanation and output != "json":
            print("\n".join(explanation), flush=True)
        raise Refused(
            reason=outcome.reason,
            message=outcome.message,
            hint=_hint(outcome),
            retryable=outcome.retryable,
            blockers=outcome.blockers,
            explanation=outcome.explanation,
            revision=outcome.revision,
            changed=outcome.changed,
            estimate=outcome.estimate,
        )
    if output == "json":
        print_json(to_json.encode(outcome))
        return failures.DONE
    lines = [f"GPU {each.gpu_index}: {each.message}" for each in outcome.steps]
    lines += [
        f"you would get {'a ' if each.is_share or each.profile == 'whole' else ''}{device_words(each)}"
        for each in outcome.devices
    ]
    lines += [f"note: {each}" for each in outcome.notes]
    if explanation:
        lines += [f"score {outcome.score:.3f} (lower is better)", "", *explanation]
    print("\n".join(lines))
    return failures.DONE


def _hint(outcome: NoPlan) -> str:
    """Return the hint of a refusal, with when the request would start if it waited."""
    start = "" if outcome.estimate is None else likely_start(outcome.estimate)
    if outcome.estimate is None or not start:
        return outcome.hint
    words = f"with --wait: {start} ({basis(outcome.estimate)})"
    return f"{outcome.hint}; {words}" if outcome.hint else words
