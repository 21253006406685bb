"""What people and programs are told of shares: tables, maps, lines and JSON, from answers and without an agent."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mig_agent.client import decode, from_json, to_json
from mig_agent.client.slice_maps import mode_words, slice_maps, status_svg
from mig_agent.client.types import Available, GpuModel, Profile, Status
from mig_agent.core.errors import Blocker
from mig_agent.kubectl.agent_pods import AgentPod
from mig_agent.migctl.answers import Answer
from mig_agent.migctl.commands.profiles import _model
from mig_agent.migctl.commands.show import _lines
from mig_agent.migctl.failures import _summary
from mig_agent.migctl.lease_names import describe
from mig_agent.migctl.nodes_page import status_page
from mig_agent.migctl.printing import device_words, gpu_state
from mig_agent.migctl.status_page import Page, render
from mig_agent.migctl.top_view import NodeReading, View, list_lines, plain
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.answers import DEVICE, GPU, LEASE, SHARE, SHARE_DEVICE, SHARE_LEASE, SHARED_GPU, SHARED_MEMORY

PROMISE = "enforced by MPS: each process is limited, not faults or bandwidth"
NODE = Status(
    node="node-1",
    revision=7,
    gpus=(GPU, SHARED_GPU),
    leases=(LEASE, SHARE_LEASE),
    queue=(),
    started_at=0.0,
    ledger_error="",
    version="1",
    driver_version="580",
    strict_fifo=False,
    available=(Available(profile="1g.10gb", memory_mib=9984, count=6),),
    largest_share_mib=39_648,
)


def test_one_line_says_who_enforces_a_share_and_what_that_is_worth() -> None:
    words = f"share of 4 GiB and 25% of the multiprocessors on GPU 1, {PROMISE}"
    assert device_words(SHARE_DEVICE) == words
    assert device_words(replace(SHARE_DEVICE, compute_percent=None)) == f"share of 4 GiB on GPU 1, {PROMISE}"
    assert device_words(DEVICE) == "1g.10gb (9.75 GiB) on GPU 0, slice 0"
    whole = replace(DEVICE, profile="whole", placement=None)
    assert device_words(whole) == "whole GPU (9.75 GiB) on GPU 0"


def test_blockers_of_one_gpu_in_one_line_say_what_nobody_holds() -> None:
    leased = Blocker(gpu_index=0, what="share of 1 GiB", state="leased", holder="notebook")
    ending = Blocker(gpu_index=0, what="share of 2 GiB", state="destroying")
    assert _summary([leased, ending]) == "GPU 0: leased to notebook; share of 2 GiB is destroying"
    assert _summary([leased, ending, ending]) == "GPU 0: leased to notebook; 2 devices are destroying"


def test_status_draws_shared_gpus_as_bars_in_gib() -> None:
    page = render(NODE, Page())
    assert max(map(len, page.splitlines())) <= 80
    assert re.search(r"^GPU 1 shared, L40S +│█b.*│ 38.84 GiB free +│$", page, re.MULTILINE)
    assert "6 x 1g.10gb, shares of up to 38.71 GiB" in page
    assert "fits now (up to 38.71 GiB)" in page
    assert "idle" not in page, "the whole GPU is not there while it is shared"
    assert re.search(r"^l2 +bob +1 +- +share 4 GiB ", page, re.MULTILINE)
    assert "GPU 1 is shared: it has no MIG mode" in page


def test_status_of_one_shared_gpu_has_its_account() -> None:
    page = render(replace(NODE, gpus=(SHARED_GPU,)), Page(boxes=True))
    assert "GPU 1: NVIDIA L40S, shared, 4.12 GiB of 42.96 GiB taken" in page
    assert "│4 GiB │" in page


def test_a_gpu_is_said_to_be_whole_shared_or_in_mig_mode() -> None:
    whole = replace(SHARED_GPU, instances=SHARED_GPU.instances[:1])
    assert [mode_words(each) for each in (GPU, whole, SHARED_GPU)] == ["", "whole", "shared"]
    assert mode_words(replace(SHARED_GPU, state="cordoned")) == "cordoned, shared"
    assert gpu_state(whole) == "GPU 1 can be leased whole or shared: it has no MIG mode"
    leased = replace(whole, instances=(replace(whole.instances[0], state="leased"),))
    assert gpu_state(leased) == "GPU 1 is leased whole: it has no MIG mode"
    assert gpu_state(replace(whole, shared_memory=None)) == "GPU 1 can be leased whole: it has no MIG mode"


def test_what_other_processes_use_is_drawn_too() -> None:
    memory = replace(SHARED_MEMORY, others_mib=2_048)
    _, shared = slice_maps(replace(NODE, gpus=(GPU, replace(SHARED_GPU, shared_memory=memory))))
    assert [(each.label, each.state, each.start) for each in shared.blocks] == [
        ("4 GiB", "leased", 0),
        ("2 GiB", "foreign", 4_224),
    ]
    tight = replace(memory, usable_mib=5_000)
    (drawn,) = slice_maps(replace(NODE, gpus=(replace(SHARED_GPU, shared_memory=tight),)))
    assert drawn.shared_mib == 4_224 + 2_048, "more is taken than could be shared since the settings changed"


def test_the_picture_says_it_in_words_too() -> None:
    assert "GPU 1: NVIDIA L40S, shared, 4.12 GiB of 42.96 GiB taken: 4 GiB, leased, bob; 38.84 GiB, free" in status_svg(
        NODE
    )


def test_top_has_a_row_of_each_share_and_of_the_gpu_below_it() -> None:
    header, lines = list_lines(NodeReading(NODE, {}, str), View(), None)
    rows = plain([header, *lines]).splitlines()
    assert re.search(r"^1 +shared +10% taken .* -$", rows[2])
    assert re.search(r"^1 +share 4 GiB +leased .* bob$", rows[3])


def test_show_names_no_variables_with_which_nothing_would_be_limited() -> None:
    text = "\n".join(_lines(SHARE_LEASE, NODE, {}))
    assert f"device   share of 4 GiB and 25% of the multiprocessors on GPU 1, {PROMISE}" in text
    assert "CUDA_VISIBLE_DEVICES=" not in text
    assert "with CUDA_VISIBLE_DEVICES alone nothing is limited" in text
    found = to_json.lease_in_full(SHARE_LEASE, NODE, {})
    assert isinstance(found, dict)
    assert found["env"] == {"MIG_AGENT_LEASE": "l2"}
    assert "CUDA_VISIBLE_DEVICES=MIG-1" in "\n".join(_lines(LEASE, NODE, {}))


def test_profiles_say_what_a_gpu_without_mig_can_serve() -> None:
    whole = Profile(
        id=0, name="whole", compute_slices=1, memory_slices=1, memory_mib=46_068, placements=(), attributes=()
    )
    model = GpuModel(
        model="NVIDIA L40S",
        gpus=(1,),
        memory_slices=1,
        memory_mib=46_068,
        profiles=(whole,),
        shared_memory=replace(SHARED_MEMORY, taken_mib=0),
    )
    text = _model(model)
    assert text.startswith("NVIDIA L40S (GPU 1), without MIG mode\n")
    assert text.endswith(f"\nshares of 1 GiB to 42.84 GiB, {PROMISE}")
    assert "shares" not in _model(replace(model, shared_memory=None))
    by_cgroup = replace(SHARED_MEMORY, enforced_by="cgroup", promise="enforced by the driver")
    other = _model(replace(model, shared_memory=by_cgroup))
    assert other.endswith("enforced by the driver; `migctl request` gets it by MPS")
    alone = _model(replace(model, shared_memory=replace(by_cgroup, without_process="")))
    assert alone.endswith("; only for `migctl run`")


def test_a_share_is_named_in_messages_about_leases() -> None:
    assert describe(SHARE_LEASE) == "l2 of bob: share 4 GiB on GPU 1"


def test_the_page_of_a_cluster_counts_the_largest_share_of_all_nodes() -> None:
    pod = AgentPod(node="node-1", name="a")
    page = status_page([Answer(pod, NODE)], Page(), "node")
    assert "GPU 1 shared, L40S" in page
    assert "shares of up to 38.71 GiB" in page


def test_json_of_a_shared_node_can_be_read_back() -> None:
    found = to_json.encode(NODE)
    assert to_json.encode(from_json.status(found)) == found
    assert isinstance(found, dict)
    assert found["largest_share_mib"] == 39_648


def test_a_gpu_that_is_not_shared_and_an_older_agent_have_no_account() -> None:
    older = decode.gpu(pb.Gpu(index=0, instances=[pb.Instance(profile="1g.10gb")]))
    assert older.shared_memory is None
    assert not older.is_shared
    encoded = to_json.encode(older)
    assert isinstance(encoded, dict)
    assert "shared_memory" not in encoded


@pytest.mark.parametrize(("taken", "largest"), [(0, 43_872), (42_848, 1_024), (42_849, 0)])
def test_the_largest_share_of_a_gpu_is_what_is_left_and_not_less_than_the_least(taken: int, largest: int) -> None:
    assert replace(SHARED_MEMORY, taken_mib=taken).largest_mib == largest


def test_a_share_is_told_from_other_devices() -> None:
    assert SHARE.is_share
    assert SHARE_DEVICE.is_share
    assert not SHARE_DEVICE.is_mig
    assert not DEVICE.is_share
