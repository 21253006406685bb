"""Traces of pods in rounds: the file, who is served on GPUs of several models, and the bound that nobody surpasses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from placement import main
from placement_bench.ceiling import ceiling
from placement_bench.contenders import AGENT, FIRST_FIT, REPACKED
from placement_bench.mixed import MixedAgent, MixedRules, model, replay
from placement_bench.mixes import kinds, layout
from placement_bench.replay import BACKWARDS, RUNNERS, UPPER_BOUND, all_of
from placement_bench.rounds import Asked, Rounds, in_rounds, made_up, read, write
from placement_bench.rules import driver, first_fit, plain

from mig_agent.core.planning.plan import DEFAULT_POLICY
from mig_agent.core.requests import memory_want

A100, H100 = model("a100-40gb"), model("h100-80gb")
HEAD = "round,pod,memory,lasts\n"


def pods(*asked: tuple[int, str, int]) -> Rounds:
    """(round, memory, rounds that it stays) of each, named a, b, c ..."""
    return in_rounds(
        [
            Asked(name=chr(ord("a") + number), memory=memory, comes=comes, ends=comes + lasts)
            for number, (comes, memory, lasts) in enumerate(asked)
        ]
    )


# ------------------------------------------------------------ the trace and its file


def test_a_trace_is_made_up_the_same_for_one_seed() -> None:
    found = made_up(50, 8, seed=2)
    assert found == made_up(50, 8, seed=2)
    assert found != made_up(50, 8, seed=3)
    assert [len(row) for row in found] == [8] * 6 + [2]
    assert len({asked.name for asked in all_of(found)}) == 50
    for number, row in enumerate(found):
        assert all(asked.comes == number < asked.ends for asked in row)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rounds = made_up(50, 8, seed=2)
    write(tmp_path / "trace.csv", rounds)
    assert read(tmp_path / "trace.csv") == rounds


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    """Columns in any order, rounds in any order, and one in which nobody comes."""
    file = tmp_path / "trace.csv"
    file.write_text("pod,lasts,round,memory\nlate,1,2,9.5Gi\nfirst,3,0,5G\nsecond,1,0,10G\n", encoding="utf-8")
    found = read(file)
    assert [[asked.name for asked in row] for row in found] == [["first", "second"], [], ["late"]]
    assert [asked.memory_bytes for asked in all_of(found)] == [5 * 10**9, 10**10, int(9.5 * 2**30)]
    assert found[0][0].ends == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{HEAD}0,a,5G,1\n0,b,much,1\n", "line 3: it needs round, pod, memory, lasts"),
        (f"{HEAD}0,a,5G,0\n", "line 2: it needs"),
        (f"{HEAD}-1,a,5G,1\n", "line 2: it needs"),
        (f"{HEAD}0,a,5G\n", "line 2: it needs"),
        ("pod,memory\na,5G\n", "line 2: it needs"),
        (f"{HEAD}0,,5G,1\n", "line 2: it needs"),
        (f"{HEAD}0,a,5G,1\n1,a,5G,1\n", "line 3: there is a pod a already"),
        (HEAD, "no pod"),
    ],
    ids=["memory", "ends at once", "before the first", "short", "columns", "no name", "twice", "empty"],
)
def test_a_file_that_cannot_be_meant(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text, encoding="utf-8")
    assert main(["rounds", "--trace", str(file)]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "cannot" in told


# ------------------------------------------------------------ who is served


def test_kinds_of_the_benchmarks_own_model_are_its_plain_profiles() -> None:
    assert plain(layout()) == kinds()


def test_a_rule_takes_the_smallest_profile_that_has_the_memory() -> None:
    """5G is one slice on either model, 10G two on the A100: where GPUs are asked in turn, its eighth slice is free."""
    gpus = MixedRules([A100, H100], first_fit)
    assert gpus.take(memory_want("5G")) == (0, 0b1)
    assert gpus.take(memory_want("10G")) == (0, 0b1100)
    assert gpus.take(memory_want("40G")) == (1, 0b1111)
    assert gpus.take(memory_want("80G")) is None
    assert gpus.take(memory_want("81G")) is None


def test_a_rule_gives_the_slices_back() -> None:
    gpus = MixedRules([H100], driver)
    whole = gpus.take(memory_want("80G"))
    assert whole is not None
    assert gpus.take(memory_want("5G")) is None
    gpus.give_back(whole)
    assert gpus.take(memory_want("80G")) == whole


def test_models_of_other_sizes_have_rules_of_their_own() -> None:
    """The A30 has four slices, the RTX PRO 6000 twelve, of which its smallest profile takes three."""
    gpus = MixedRules([model("a30-24gb"), model("rtx-pro-6000-96gb")], first_fit)
    assert [gpus.take(memory_want("5G")) for _ in range(5)] == [(0, 1), (0, 2), (0, 4), (0, 8), (1, 0b111)]


def test_the_agent_takes_the_model_on_which_least_is_wasted() -> None:
    gpus = MixedAgent([H100, A100], DEFAULT_POLICY)
    small, large = gpus.take(memory_want("5G")), gpus.take(memory_want("40G"))
    assert small is not None
    assert large is not None
    assert (small[0].slot.profile.name, large[0].slot.profile.name) == ("1g.5gb", "3g.40gb")


def test_pods_that_do_not_fit_are_lost_and_ended_ones_free_capacity() -> None:
    rounds = pods((0, "80G", 2), (1, "5G", 1), (2, "5G", 1))
    for name in (FIRST_FIT, AGENT, REPACKED):
        assert RUNNERS[name]([H100], rounds) == {"a", "c"}


def test_which_gpu_comes_first_is_all_that_differs_backwards() -> None:
    rounds = pods((0, "10G", 1), (0, "80G", 1))
    assert RUNNERS[FIRST_FIT]([A100, H100], rounds) == {"a", "b"}
    assert RUNNERS[BACKWARDS]([A100, H100], rounds) == {"a"}


def test_only_repacking_moves_instances() -> None:
    """Two of 20G that stay, and between them others that end: two windows of 20G that are no window of 40G."""
    rounds = pods((0, "20G", 2), (0, "20G", 1), (0, "40G", 2), (1, "10G", 1), (1, "40G", 1))
    assert "e" not in RUNNERS[FIRST_FIT]([H100], rounds)
    assert RUNNERS[REPACKED]([H100], pods((0, "10G", 2), (0, "40G", 1), (1, "20G", 1), (1, "40G", 1))) == set("abcd")


# ------------------------------------------------------------ the bound


def test_the_bound_is_exact_where_that_is_easy() -> None:
    assert ceiling(pods((0, "80G", 1), (0, "80G", 1)), [H100], [1.0, 1.0]) == pytest.approx(1.0, abs=0.01)
    assert ceiling(pods((0, "5G", 1), (1, "5G", 1)), [H100], [1.0, 1.0]) == pytest.approx(2.0)
    assert ceiling(pods((0, "90G", 1)), [H100], [1.0]) == pytest.approx(0.0, abs=0.01)
    eight = pods(*[(0, "5G", 1)] * 8)
    assert ceiling(eight, [H100], [1.0] * 8) == pytest.approx(7.0, abs=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_no_policy_exceeds_the_bound(seed: int) -> None:
    rounds = made_up(60, 8, seed)
    asked = all_of(rounds)
    for worth in ([1.0] * len(asked), [each.memory_bytes / 1e9 for each in asked]):
        most = ceiling(rounds, [A100, H100], worth)
        assert most < sum(worth), "it says nothing"
        for name, runner in RUNNERS.items():
            served = runner([A100, H100], rounds)
            reached = sum(value for each, value in zip(asked, worth, strict=True) if each.name in served)
            assert reached <= most + 1e-6, name


# ------------------------------------------------------------ the part


def test_a_trace_from_a_file_gives_what_it_gave_when_it_was_made_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.csv"
    models = ("--gpu-models", "a100-40gb", "h100-80gb")
    given = ("rounds", "-o", "json", "--seed", "5", *models)
    assert main([*given, "--requests", "60", "--repeats", "1", "--write-trace", str(file)]) == 0
    made = capsys.readouterr().out
    assert main([*given, "--trace", str(file)]) == 0
    assert capsys.readouterr().out == made
    (found,) = json.loads(made)
    rows = {row["policy"]: row for row in found["data"] if "lost" in row}
    assert rows.keys() == {*RUNNERS, UPPER_BOUND}
    (orders,) = (row for row in found["data"] if "orders" in row)
    alone = replay(MixedAgent([A100, H100], DEFAULT_POLICY), read(file))
    assert rows[AGENT]["pods_served"] == len(alone) == 60 - len(rows[AGENT]["lost"])
    assert orders["pods_served_least"] <= orders["pods_served_most"] <= rows[UPPER_BOUND]["pods_served"]


def test_one_file_is_not_read_for_two_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--trace", "my.csv"])
    assert "name one of them" in capsys.readouterr().err


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rounds", "--gpu-models", "h100", "--requests", "5"]) == 2
    assert "cannot take h100 for a GPU model; there are a100-40gb" in capsys.readouterr().err
