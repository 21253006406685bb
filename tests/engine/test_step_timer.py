"""How long creating and destroying takes is measured where it happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from mig_agent.core.errors import RefusedError
from mig_agent.engine.gpu_worker import FIRST_GUESS, MEASURED, StepTimer, timed
from mig_agent.simulator import Code
from support.engine import ANYBODY, CREATE, engine


def test_the_guess_goes_with_the_first_measurement_and_old_ones_go_with_new_ones() -> None:
    timing = StepTimer()
    assert timing.step_times == FIRST_GUESS
    timing.created(3.0)
    timing.created(1.0)
    assert timing.step_times.create == 2.0
    assert timing.step_times.destroy == FIRST_GUESS.destroy
    for _ in range(MEASURED):
        timing.created(5.0)
        timing.destroyed(0.25)
    assert (timing.step_times.create, timing.step_times.destroy) == (5.0, 0.25)


def test_an_answer_comes_with_its_time() -> None:
    answer, seconds = timed(lambda: "made")
    assert answer == "made"
    assert seconds >= 0.0


async def test_creations_and_destructions_are_measured_and_reuses_are_not(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("1g.5gb")
        created = node.manager.step_times
        assert created.create != FIRST_GUESS.create
        assert created.destroy == FIRST_GUESS.destroy
        await node.release(granted)
        await node.release(await node.acquire("1g.5gb"))
        assert node.manager.step_times == created
        await node.manager.reclaim([], ANYBODY)
        assert node.manager.step_times.create == created.create
        assert node.manager.step_times.destroy != FIRST_GUESS.destroy


async def test_what_fails_is_not_counted(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.simulator.fail(CREATE, Code.UNKNOWN, times=None)
        with pytest.raises(RefusedError):
            await node.acquire("1g.5gb")
        assert node.manager.step_times == FIRST_GUESS
