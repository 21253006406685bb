"""One training as its program sees it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent import elastic
from mig_agent.core.errors import UsageError
from mig_agent.elastic.environment import ProcessPlace
from mig_agent.elastic.sample_order import Position
from support.elastic_training import GLOBAL_BATCH, SAMPLES, Network, train


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIG_AGENT_CHECKPOINTS", str(tmp_path / "checkpoints"))


@contextlib.contextmanager
def job(global_batch: int, max_batch: int, devices: int | None = None) -> Iterator[elastic.Job]:
    made = elastic.init(global_batch, max_batch, devices=devices)
    try:
        yield made
    finally:
        made.close()


def test_the_old_calls() -> None:
    with job(256, 64) as made:
        assert (made.steps, made.batch_size, made.devices, made.master) == (4, 64, 1, True)
        assert elastic.current_job() is made


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ProcessPlace()),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, ProcessPlace()),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, ProcessPlace(devices_here=2)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ProcessPlace()),
        (
            {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "here", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3"},
            ProcessPlace(rank=1, processes=3, master_address="here"),
        ),
        (
            {"MIG_AGENT_DEVICE_PROFILE": "1g.10gb", "MIG_AGENT_DEVICE_MEMORY": "9728"},
            ProcessPlace(profile="1g.10gb", memory_mib=9728),
        ),
    ],
)
def test_the_environment_says_where_a_process_is(environment: dict[str, str], expected: ProcessPlace) -> None:
    assert ProcessPlace.from_environment(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x"}, {"WORLD_SIZE": "0"}, {"MIG_AGENT_DEVICE_MEMORY": "9G"}],
)
def test_an_environment_that_makes_no_sense(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"^cannot "):
        ProcessPlace.from_environment(environment)


def test_every_shape_gives_the_same_weights() -> None:
    """By hand and in float64: what differs is the order of sums."""
    undisturbed = Network()
    with job(GLOBAL_BATCH, GLOBAL_BATCH) as made:
        train(undisturbed, made, 6)
    assert len(undisturbed.taken) == 6 * SAMPLES
    assert sorted(undisturbed.taken[:SAMPLES]) == list(range(SAMPLES))
    for max_batch, devices in ((1, 1), (5, 1), (7, 1), (2, 3), (4, 2), (1, 16)):
        other = Network()
        with job(GLOBAL_BATCH, max_batch, devices) as made:
            train(other, made, 6)
        assert other.taken == undisturbed.taken
        assert max(abs(a - b) for a, b in zip(other.weights, undisturbed.weights, strict=True)) < 1e-12


def test_weights_that_are_wrong_would_be_seen() -> None:
    """A mean of means of unequal micro-batches is another gradient."""
    right, wrong = Network(), Network()
    with job(5, 3) as made:
        assert [each.size for (each,) in made.plan.steps] == [3, 2]
    mean_of_means = [(a + b) / 2 for a, b in zip(right.gradient([0, 1, 2]), right.gradient([3, 4]), strict=True)]
    right.step(right.gradient(range(5)))
    wrong.step(mean_of_means)
    assert max(abs(a - b) for a, b in zip(right.weights, wrong.weights, strict=True)) > 1e-6


def test_a_loop_that_is_left_goes_on_where_it_was() -> None:
    with job(4, 2) as made:
        taken = list[int]()
        for _ in made.epochs(1):
            while made.position.epoch == 0:
                for number, batch in enumerate(made.batches(range(21)), 1):
                    taken += batch
                    if number == 4:
                        break
        assert taken == list(range(21))
        assert made.position == Position(epoch=1, sample=0, step=6)


def test_a_step_that_is_left_in_its_middle_is_done_again() -> None:
    with job(4, 2) as made:
        for _ in made.batches(range(8)):
            assert not made.is_last
            assert made.position == Position()
            break
        assert list(made.batches(range(8))) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_an_epoch_that_is_left_is_over() -> None:
    with job(4, 4) as made:
        seen = [(epoch, next(made.batches(range(8)))) for epoch in made.epochs(3)]
        assert seen == [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [0, 1, 2, 3])]


def test_a_run_that_goes_on_says_after_which_step(capsys: pytest.CaptureFixture[str]) -> None:
    for before, words in ((False, ""), (True, "elastic: going on after step 5\n")):
        with job(4, 4) as made:
            assert made.checkpoint(Path.touch, Path.stat, every=5) is before
            for _ in made.batches(range(20)):
                pass
        assert capsys.readouterr().err == words


def test_the_global_batch_may_change_between_runs() -> None:
    with job(4, 2) as made:
        made.checkpoint(lambda path: path.touch(), lambda _path: None)
        for number, _ in enumerate(made.batches(range(20)), 1):
            if number == 4:
                made.save()
                break
    with job(6, 6) as made:
        assert made.checkpoint(lambda path: path.touch(), lambda _path: None)
        assert list(made.batches(range(20))) == [list(range(8, 14)), list(range(14, 20))]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_notice_ends_the_program_between_steps(number: signal.Signals) -> None:
    network = Network()
    with job(GLOBAL_BATCH, 5) as made:
        assert not made.checkpoint(network.save, network.load)
        with pytest.raises(elastic.Yielded) as ended:
            train(network, made, 6, lambda step: os.kill(os.getpid(), number) if step == 5 else None)
        assert ended.value.code == elastic.YIELD_CODE == 75
    again = Network()
    with job(GLOBAL_BATCH, 3) as made:
        assert made.checkpoint(again.save, again.load)
        assert made.position.step == 5
        assert again.weights == network.weights


def test_who_asks_may_save_in_a_way_of_their_own() -> None:
    with job(4, 2) as made:
        seen = 0
        for _ in made.batches(range(40)):
            seen += 1
            if seen == 5:
                assert not made.should_yield()
                os.kill(os.getpid(), signal.SIGTERM)
            if made.is_last and made.should_yield():
                break
        assert (seen, made.position.step) == (6, 3)
        with pytest.raises(elastic.Yielded):
            made.yield_now()


@pytest.mark.parametrize(("every", "expected"), [(3, [3, 6, 9]), ("1ms", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), (None, [])])
def test_how_often_it_is_saved(every: str | int | None, expected: list[int]) -> None:
    saved = list[int]()
    with job(4, 4) as made:

        def save(path: Path) -> None:
            path.touch()
            saved.append(made.position.step)

        made.checkpoint(save, lambda _path: None, every=every)
        for _ in made.batches(range(40)):
            if every == "1ms":
                signal.sigtimedwait([], 0.002)
    assert saved == expected


@pytest.mark.parametrize("every", [0, -1, "soon", "0s"])
def test_an_interval_that_is_none(every: str | int) -> None:
    with job(4, 4) as made, pytest.raises(UsageError, match=r"^cannot "):
        made.checkpoint(lambda path: path.touch(), lambda _path: None, every=every)


def test_mistakes_are_told_in_words() -> None:
    with job(4, 4) as made:
        with pytest.raises(UsageError, match="cannot take batches from a generator"):
            next(made.batches(each for each in range(3)))
        with pytest.raises(UsageError, match="cannot tell a weight"):
            assert made.weight
        with pytest.raises(UsageError, match="cannot save a checkpoint: how is not known"):
            made.save()
        made.checkpoint(lambda path: path.touch(), lambda _path: None)
        for _ in made.batches(range(12)):
            pass
        made._position = Position(sample=12, step=3)
        with pytest.raises(UsageError, match="cannot go on at sample 12: this epoch has 8"):
            next(made.batches(range(8)))


def test_before_init_there_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mig_agent.elastic.start._jobs", [])
    with pytest.raises(UsageError, match="there is none yet"):
        elastic.current_job()


def test_an_order_of_the_programs_own() -> None:
    with job(2, 2) as made:
        assert list(made.batches("abcd", order=lambda epoch: [3, 1, 2, epoch])) == [["d", "b"], ["c", "a"]]
