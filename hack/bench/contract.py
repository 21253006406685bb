"""Measures what each part of the agent's contract costs: `hack/bench/contract.py [--rounds N] [--part PART]...`.

An agent with everything and one without each part run side by side, and take turns with acquire and release of an idle
match, so that all see the same machine. A part's cost is the difference of the medians, in the time of a pair and in
the agent's processor time. The parts overlap in time, so that their costs need not add up to the whole.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from calls import Pair, echo_pair, latencies, lease_pair, unconfirmed_lease_pair
from figures import median
from processes import HERE, agent, echo
from without import PARTS

_PAIRS = 40
"""Pairs of one turn."""
_WHOLE = "with everything"


@dataclass(slots=True)
class Measured:
    """One agent, and what its pairs took."""

    pid: int
    pair: Pair
    seconds: list[float] = field(default_factory=list)
    processor_seconds: float = 0.0

    async def turn(self) -> None:
        """Make the pairs of one turn."""
        before = _processor_seconds(self.pid)
        self.seconds += await latencies(self.pair, _PAIRS)
        self.processor_seconds += _processor_seconds(self.pid) - before

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Median time of a pair, and the process's mean processor time for it."""
        return median(self.seconds) * 1e3, self.processor_seconds / len(self.seconds) * 1e3


def _processor_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def measure(rounds: int, parts: Sequence[str]) -> dict[str, Measured]:
    """Measure two bare echoes, the agent with everything, and without each of these parts."""
    async with contextlib.AsyncExitStack() as stack:
        bare = stack.enter_context(echo())
        found = {"two bare echoes": Measured(bare.pid, echo_pair(await _channel(stack, bare.address)))}
        for part in ("", *parts):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mig-bench-")))
            program = (str(HERE / "without.py"), part) if part else ("-m", "mig_agent")
            served = stack.enter_context(agent("h100-80gb:2", state_dir=folder, program=program))
            # Without the relay, who calls is taken for granted: that is gRPC's own socket.
            address = f"unix://{folder}/sockets/users" if part == "relay" else served.address
            channel = await _channel(stack, address)
            pair = unconfirmed_lease_pair(channel) if part == "confirmation" else lease_pair(channel)
            found[part or _WHOLE] = Measured(served.pid, pair)
        for each in found.values():
            await latencies(each.pair, _PAIRS)
        for _ in range(rounds):
            for each in found.values():
                await each.turn()
    return found


async def _channel(stack: contextlib.AsyncExitStack, address: str) -> grpc.aio.Channel:
    return await stack.enter_async_context(grpc.aio.insecure_channel(address))


def table(found: dict[str, Measured]) -> str:
    """Return the costs as a table in Markdown, the highest first."""
    whole, whole_processor = found[_WHOLE].milliseconds
    costs = {
        part: (whole - found[part].milliseconds[0], whole_processor - found[part].milliseconds[1])
        for part in PARTS
        if part in found
    }
    lines = ["| part | what it gives | time of a pair | processor time |", "|---|---|---:|---:|"]
    for part, (time, processor) in sorted(costs.items(), key=lambda each: -each[1][0]):
        lines.append(f"| {part} | {PARTS[part][0]} | {time:.2f} ms | {processor:.2f} ms |")
    for name in (_WHOLE, "two bare echoes"):
        time, processor = found[name].milliseconds
        lines.append(f"| **{name}** | | {time:.2f} ms | {processor:.2f} ms |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help=f"turns of {_PAIRS} pairs for each agent")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="only this one; may be repeated")
    chosen = parser.parse_args(arguments)
    print(table(asyncio.run(measure(chosen.rounds, chosen.part or tuple(PARTS)))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
