"""`migctl doctor`: checks this machine, its driver and its agent, and names the command that mends what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mig_agent.core.quantities import counted
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, verb
from mig_agent.migctl.printing import print_json, print_whole, wants_color

if TYPE_CHECKING:
    from mig_agent.doctor.findings import Finding

_FOUND_FAULTS = 1
_COLORS = {"ok": "32", "warning": "33", "failed": "31", "unknown": "36"}
_WIDTH = len("warning")


@verb(short_help="Check this machine, its driver and its agent.")
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The agent's settings, where no agent runs. Default: MIG_AGENT_CONFIG, else /etc/mig-agent/config.yaml.",
)
@click.option("--problems", is_flag=True, help="Leave out what is as it should be.")
def doctor(common: Common, *, config: Path | None, problems: bool) -> int:
    """Check this machine: driver, GPUs and MIG mode, device nodes, containers, your access, agent and ledger.

    Changes nothing, and works with no agent running. Each line that is not ok names the command that mends it. As root
    it sees everything. Exits with 1 if a check failed.
    """
    output = common.wants()
    from mig_agent.client.addresses import resolve  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC
    from mig_agent.doctor.examination import examine  # noqa: PLC0415 -- as above
    from mig_agent.doctor.probe import Probe  # noqa: PLC0415 -- as above
    from mig_agent.doctor.report import is_failed, to_json  # noqa: PLC0415 -- as above
    from mig_agent.doctor.subject import gather  # noqa: PLC0415 -- as above

    endpoint = common.endpoint()
    subject = gather(Probe(), resolve(endpoint.address), endpoint.tls, config)
    found = examine(subject)
    if output == "json":
        print_json(to_json(subject, found))
    else:
        print_whole("\n".join(_lines(found, color=wants_color(), all_of_them=not problems)))
    return _FOUND_FAULTS if is_failed(found) else failures.DONE


def _lines(found: Mapping[str, Iterable[Finding]], *, color: bool, all_of_them: bool) -> Iterator[str]:
    """Yield the findings under their headings, and a line that counts them."""
    from mig_agent.doctor.findings import CheckStatus, counts  # noqa: PLC0415 -- imported by now

    everything = [each for group in found.values() for each in group]
    for heading, group in found.items():
        shown = [each for each in group if all_of_them or each.status is not CheckStatus.OK]
        if shown:
            yield heading
            for each in shown:
                yield f"  {_colored(each.status, color=color)}  {failures.one_line(each.message)}"
                if each.hint:
                    yield f"  {'':{_WIDTH}}  -> {failures.one_line(each.hint)}"
    numbers = counts(everything)
    parts = [f"{number} {status}" for status, number in numbers.items() if number]
    yield f"{counted(len(everything), 'finding')}: {', '.join(parts)}"


def _colored(status: str, *, color: bool) -> str:
    padded = f"{status:{_WIDTH}}"
    return f"\033[{_COLORS[status]}m{padded}\033[0m" if color else padded
