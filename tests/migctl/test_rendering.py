"""What a person reads: tables and maps from answers, without an agent."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from mig_agent.client import to_json
from mig_agent.client.types import (
    Account,
    AccountRow,
    Advice,
    Available,
    Instance,
    KubeletDevice,
    MigMode,
    Placement,
    Pod,
    StartEstimate,
    Status,
    Waiting,
)
from mig_agent.core.errors import Blocker, UsageError
from mig_agent.core.quantities import format_mib
from mig_agent.engine.history import MOST_CASES
from mig_agent.migctl.commands import advise, usage
from mig_agent.migctl.options import moment
from mig_agent.migctl.printing import place, slices, table, until
from mig_agent.migctl.status_page import MOST_LINES, Page
from mig_agent.migctl.status_page import render as render_page
from support import answers
from support.answers import DEVICE, LEASE, LEASED

BLOCKED = replace(
    LEASED,
    uuid="MIG-2",
    generation=2,
    placement=Placement(4, 4),
    profile="3g.40gb",
    state="blocked",
    lease="",
    holder="",
    reason="python (pid 4711) is on it",
)
GPU = replace(answers.GPU, instances=(LEASED, BLOCKED))
NODE = Status(
    node="node-1",
    revision=7,
    gpus=(GPU,),
    leases=(LEASE,),
    queue=(Waiting(request_id="r", holder="bob", tenant="", priority=0, position=1, since=0.0, wants="7g.80gb"),),
    started_at=0.0,
    ledger_error="",
    version="1",
    driver_version="580",
    strict_fifo=False,
)
WITHOUT_MIG = replace(
    GPU,
    index=1,
    state="whole",
    reason="MIG mode comes on at the next reset",
    memory_slices=1,
    mig=MigMode(capable=True, current=False, pending=True),
    instances=(replace(LEASED, placement=None, profile="whole", state="idle", lease="", holder=""),),
)


def render(
    node: Status, *, width: int, color: bool, unicode: bool, cut: bool = False, boxes: bool = False, leases: bool = True
) -> str:
    """The page with all leases, or as short as it can be."""
    page = Page(width=width, color=color, unicode=unicode, cut=cut, boxes=boxes, leases=leases)
    return render_page(node, page)


def test_status_names_everything_and_fits_80_columns() -> None:
    page = render(NODE, width=80, color=False, unicode=True)
    assert max(map(len, page.splitlines())) <= 80
    for words in ("node-1", "1 GPU, 1 lease, 1 waiting", "unused", "pid 4711", "bob", "7g.80gb", "1g.10gb"):
        assert words in page
    assert "\x1b" not in page


def test_on_a_terminal_long_names_are_cut_to_fit_and_nothing_else_is() -> None:
    long = replace(LEASE, holder="pod a-long-namespace/" + "x" * 100, devices=(DEVICE,) * 8, unused=False)
    waits = replace(NODE.queue[0], holder="y" * 100, wants="2 devices: " + "z" * 100)
    node = replace(NODE, leases=(long, LEASE), queue=(waits,))
    page = render(node, width=80, color=False, unicode=True, cut=True)
    assert max(map(len, page.splitlines())) <= 80
    assert "pod a-long" in page
    assert re.search("alice .* unused", page)
    assert "x" * 100 in render(node, width=80, color=False, unicode=True), "nothing is cut in a pipe"


OF_POD = replace(
    LEASE,
    holder="pod default/train-7f2c",
    devices=(DEVICE, DEVICE),
    pod=Pod(namespace="default", name="train-7f2c"),
    arrived=True,
    kubelet_devices=tuple(KubeletDevice(resource="nvidia.com/mig-1g.10gb", id=f"mig-agent-{each}") for each in (3, 4)),
    unused=False,
)


def test_a_reserved_lease_is_marked() -> None:
    on_its_way = replace(OF_POD, arrived=False, kubelet_devices=())
    page = render(replace(NODE, leases=(on_its_way,)), width=120, color=False, unicode=True)
    assert re.search("pod default/train-7f2c .* reserved", page)
    assert "reserved" not in render(replace(NODE, leases=(OF_POD,)), width=120, color=False, unicode=True)


def test_the_map_names_a_pod_by_its_name_alone() -> None:
    held = replace(LEASED, holder="pod default/train-7f2c")
    node = replace(NODE, gpus=(replace(GPU, instances=(held,)),), leases=(OF_POD,))
    page = render(node, width=80, color=False, unicode=True, boxes=True)
    box = next(line for line in page.splitlines() if line.startswith("│") and "train" in line)
    assert box.split("│")[1].rstrip() == "train-7…", "cut at its end, where there is no room for it"
    wide = replace(held, placement=Placement(0, 4))
    node = replace(node, gpus=(replace(GPU, instances=(wide,)),))
    page = render(node, width=80, color=False, unicode=True, boxes=True)
    assert "│train-7f2c " in page
    assert "pod default/train-7f2c" in page, "the table has all of it"


def test_a_lost_device_of_a_lease_is_named_as_far_as_it_is_known() -> None:
    gone = replace(DEVICE, uuid="", profile="", placement=None)
    node = replace(NODE, leases=(replace(OF_POD, devices=(DEVICE, gone)),))
    page = render(node, width=200, color=False, unicode=True)
    assert re.search(r"l1 .* 0 +0 +1g.10gb", page)
    assert re.search(r"^ +- +- +- +lost \(nvidia.com/mig-1g.10gb mig-agent-4\)$", page, re.MULTILINE)
    on_lost_gpu = replace(DEVICE, uuid="", gpu_index=1)
    node = replace(NODE, leases=(replace(OF_POD, devices=(on_lost_gpu, DEVICE)),))
    page = render(node, width=200, color=False, unicode=True)
    assert re.search(r" 1 +0 +1g.10gb .* lost \(nvidia.com/mig-1g.10gb mig-agent-3\)$", page, re.MULTILINE)
    assert re.search(r"^ +0 +0 +1g.10gb$", page, re.MULTILINE)
    node = replace(NODE, leases=(replace(LEASE, devices=(gone,)),))
    assert re.search(r"alice .* unused, lost$", render(node, width=80, color=False, unicode=True), re.MULTILINE)


def test_a_pods_lease_in_json_says_what_its_devices_are_to_the_kubelet() -> None:
    answer = to_json.encode(OF_POD)
    assert isinstance(answer, dict)
    assert answer["kubelet_devices"] == [
        {"resource": "nvidia.com/mig-1g.10gb", "id": "mig-agent-3"},
        {"resource": "nvidia.com/mig-1g.10gb", "id": "mig-agent-4"},
    ]
    other = to_json.encode(LEASE)
    assert isinstance(other, dict)
    assert "kubelet_devices" not in other


def test_a_notebook_draws_the_status_as_the_map() -> None:
    picture, part = NODE._repr_svg_(), NODE._repr_html_()
    words = "".join(ET.fromstring(picture).itertext())  # noqa: S314 -- our own text
    for each in (NODE.node, "1g.10gb", "alice", "blocked", "slices 4-7: 3g.40gb"):
        assert each in words
    assert picture in part
    assert "<script" not in part


def test_names_in_a_notebook_are_texts() -> None:
    hostile = replace(NODE, node="</svg><script>alert(1)</script>")
    assert "<script" not in hostile._repr_html_()


def test_status_without_unicode_is_ascii() -> None:
    assert render(NODE, width=80, color=False, unicode=False).isascii()


def test_status_in_colour_says_the_same() -> None:
    plain = render(NODE, width=80, color=False, unicode=True)
    colored = render(NODE, width=80, color=True, unicode=True)
    assert colored != plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_status_says_why_a_gpu_is_not_used_and_what_comes() -> None:
    page = render(replace(NODE, gpus=(WITHOUT_MIG,), leases=(), queue=()), width=80, color=False, unicode=True)
    assert "GPU 1 can be leased whole: MIG mode comes on at the next reset" in page
    assert page.count("reset") == 1, "it is said once"
    cordoned = replace(WITHOUT_MIG, state="cordoned", reason="a fan is broken")
    page = render(replace(NODE, gpus=(cordoned,), leases=(), queue=()), width=80, color=False, unicode=True)
    assert "GPU 1 is cordoned: a fan is broken" in page
    assert "GPU 1: MIG mode will be on after a reset" in page
    by_root = replace(cordoned, reason="cordoned by root: a fan is broken")
    page = render(replace(NODE, gpus=(by_root,), leases=(), queue=()), width=80, color=False, unicode=True)
    assert "GPU 1 is cordoned by root: a fan is broken" in page


def busy(queued: int = 3) -> Status:
    """Eight full GPUs with 52 leases, as a shared machine has them."""
    gpus, leases = [], []
    for index in range(8):
        instances = []
        for start in range(7 if index < 4 else 6):
            lease = f"{index:08x}{start:08x}"
            device = replace(DEVICE, gpu_index=index, placement=Placement(start, 1), uuid=f"MIG-{index}-{start}")
            holder = ("alice", "bob (sweep-lr-1e-20)", "carol (llama-3-70b-finetune)")[start % 3]
            leases.append(replace(LEASE, id=lease, devices=(device,), holder=holder, unused=False))
            instances.append(
                replace(LEASED, gpu_index=index, placement=Placement(start, 1), lease=lease, holder=holder)
            )
        gpus.append(replace(GPU, index=index, instances=tuple(instances), unusable_slices=(7,)))
    estimate = StartEstimate(earliest=5400.0, median=7000.0, latest=10800.0, basis="leases", leases=57)
    limit = "cannot serve 7g.80gb: carol holds 2 of at most 2 leases (set by limits.roles.user.leases in config.yaml)"
    by_bob = Blocker(gpu_index=0, what="1g.10gb", state="leased", holder="bob (sweep-lr-1e-20)", expires_at=1e9)
    known, limited = replace(NODE.queue[0], estimate=estimate, blockers=(by_bob,)), replace(NODE.queue[0], limit=limit)
    waits = tuple(replace(known if each % 3 < 2 else limited, position=each + 1) for each in range(queued))
    available = tuple(
        Available(profile=name, memory_mib=mib, count=count)
        for name, mib, count in (("1g.10gb", 9984, 4), ("1g.20gb", 20096, 0), ("3g.40gb", 40448, 1))
    )
    return replace(
        NODE, gpus=tuple(gpus), leases=tuple(leases), queue=waits, available=available, reservation_after=152.0
    )


@pytest.mark.parametrize("queued", [0, 3, 300])
@pytest.mark.parametrize("unicode", [True, False])
def test_a_busy_node_fits_sixteen_lines(queued: int, unicode: bool) -> None:
    page = render(busy(queued), width=80, color=False, unicode=unicode, cut=True, leases=False)
    lines = page.splitlines()
    assert len(lines) <= MOST_LINES == 16
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("GPU ") for line in lines) == 8
    assert "fits now (up to 39.5 GiB), any one of: 4 x 1g.10gb, 1 x 3g.40gb" in lines
    waiting = f", {queued} waiting" if queued else ""
    assert lines[0] == f"node-1: 8 GPUs, 52 leases (`--leases` lists them){waiting} (revision 7)"
    assert "unusable (no profile fits)" in page
    if queued:
        assert "after 2m32s in the queue, GPUs are reserved for the request that is first" in lines
        assert any(re.match(r"1 +r +bob +7g.80gb +.* 1-3 h +GPU 0: bob", line) for line in lines)
    assert ("and 299 more" in lines) == (queued == 300)
    model = replace(busy(queued).available[0], profile="1g.12gb+gfx")
    mixed = replace(busy(queued), available=(*busy().available, *(model,) * 6))
    page = render(mixed, width=80, color=False, unicode=unicode, cut=True, leases=False)
    assert len(page.splitlines()) <= MOST_LINES
    assert max(map(len, page.splitlines())) <= 80


def test_kinds_that_fit_are_not_to_be_added_up() -> None:
    kinds = tuple(
        Available(profile=name, memory_mib=81559, count=count) for name, count in (("7g.80gb", 1), ("whole", 3))
    )
    assert "fits now (up to 79.64 GiB), any one of: 1 x 7g.80gb, 3 whole GPUs" in render(
        replace(NODE, available=kinds), width=80, color=False, unicode=True
    )
    assert "fits now (up to 79.64 GiB), just: 1 whole GPU\n" in render(
        replace(NODE, available=(replace(kinds[1], count=1),)), width=80, color=False, unicode=True
    )


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ((0,), "GPU 0 is reserved for place 1: 7g.80gb of bob"),
        ((0, 3), "GPUs 0, 3 are reserved for place 1: 7g.80gb of bob"),
    ],
)
def test_status_says_which_gpus_are_reserved_and_for_whom(gpus: tuple[int, ...], words: str) -> None:
    node = busy(3)
    first = replace(node.queue[0], reserved_gpus=gpus)
    page = render(
        replace(node, queue=(first, *node.queue[1:])), width=80, color=False, unicode=True, leases=False, cut=True
    )
    assert words in page.splitlines()
    assert "in the queue, GPUs are" not in page
    assert len(page.splitlines()) <= MOST_LINES


def test_the_queue_says_when_each_is_likely_to_start_and_what_blocks_it() -> None:
    waits = busy(3).queue
    page = render(replace(NODE, queue=waits), width=100, color=False, unicode=True, cut=True)
    assert re.search("^PLACE  REQUEST  HOLDER  WANTS +WAITS +LIKELY TO START  BLOCKED BY$", page, re.MULTILINE)
    assert re.search(r"^1 +r +bob .* 1-3 h +GPU 0: bob \(sweep-lr-1e-20\), until ", page, re.MULTILINE)
    assert re.search("^3 +r +bob .* - +its own limit$", page, re.MULTILINE)
    assert "place 3 waits for a limit of its own: cannot serve 7g.80gb: carol holds 2 of at most 2 leases" in page
    first = replace(waits[0], priority=5)
    assert "PRIORITY" in render(replace(NODE, queue=(first, *waits)), width=100, color=False, unicode=True)


def test_in_80_columns_a_queue_keeps_who_waits_and_who_blocks() -> None:
    """The end of the block, the time waited and the priority are of less use, and left out first."""
    blocker = replace(busy(1).queue[0].blockers[0], holder="hog (train)")
    waits = replace(
        busy(1).queue[0], holder="cloudsdk (wait)", blockers=(blocker,), request_id="b3d1f0a2", wants="4G", priority=5
    )
    page = render(replace(NODE, queue=(waits,)), width=80, color=False, unicode=True, cut=True)
    assert max(map(len, page.splitlines())) <= 80
    assert re.search(r"^1 +b3d1f0a2 +cloudsdk \(wait\) .* 1-3 h +GPU 0: hog \(train\)$", page, re.MULTILINE), page
    assert "until" in render(replace(NODE, queue=(waits,)), width=80, color=False, unicode=True), "nothing is cut here"


def test_a_long_note_of_a_lease_is_below_its_row() -> None:
    why = "GPU 0 is being drained by root, and the lease ends in 9m at the latest: save your work before then"
    warned = replace(LEASE, holder="cloudsdk (training)", warning=why)
    page = render(replace(NODE, leases=(warned, LEASE)), width=80, color=False, unicode=True, cut=True).splitlines()
    assert max(map(len, page)) <= 80
    row = next(number for number, line in enumerate(page) if re.match(r"l1 +cloudsdk \(training\) +0 +0 ", line))
    assert page[row + 1].startswith("    GPU 0 is being drained by root, ")
    assert " ".join(each.strip() for each in page[row + 1 : row + 3]) == why


def test_the_map_names_state_and_model() -> None:
    gpus = (
        replace(GPU, state="cordoned", reason="cordoned by root"),
        WITHOUT_MIG,
        replace(GPU, index=2, state="lost", model="", memory_slices=0, instances=()),
    )
    page = render(replace(NODE, gpus=gpus), width=80, color=False, unicode=True, cut=True)
    for words in ("^GPU 0 cordoned, H100 80GB HBM3 ", "^GPU 1 whole, H100 80GB HBM3 ", "^GPU 2 lost$"):
        assert re.search(words, page, re.MULTILINE), page
    assert max(map(len, page.splitlines())) <= 80


def test_the_queue_shows_what_to_type_for_a_request() -> None:
    """The beginning of an id that only one has; nothing of others' requests, which only their callers may cancel."""
    ids = ("b3d1f0a29c7e4d55", "b3d1f0a29c884d55", "e81c" * 8, "my-job", "")
    queue = tuple(replace(NODE.queue[0], request_id=each, position=n) for n, each in enumerate(ids, 1))
    page = render(replace(NODE, queue=queue), width=80, color=False, unicode=True, cut=True)
    for position, words in enumerate(("b3d1f0a29c7", "b3d1f0a29c8", "e81ce81c", "my-job", "-"), 1):
        assert re.search(rf"^{position} +{words} +bob ", page, re.MULTILINE)
    unknown = replace(NODE, queue=(replace(NODE.queue[0], request_id=""),))
    assert "REQUEST" not in render(unknown, width=80, color=False, unicode=True)


def test_limits_of_a_long_queue_do_not_make_the_page_long() -> None:
    queue = tuple(replace(busy(3).queue[2], position=each + 1) for each in range(50))
    page = render(replace(busy(), queue=queue), width=80, color=False, unicode=True, cut=True, leases=False)
    assert len(page.splitlines()) <= MOST_LINES
    assert page.count("its own limit") == 1
    assert "and 49 more" in page


def test_all_leases_have_their_gpu_and_slices() -> None:
    page = render(busy(), width=80, color=False, unicode=True, cut=True)
    assert max(map(len, page.splitlines())) <= 80
    assert len(re.findall(r"^0000000[0-7]0000000[0-6] +(alice|bob|carol)", page, re.MULTILINE)) == 52
    assert re.search(r"^0000000300000005 +carol \(.* 3 +5 +1g.10gb", page, re.MULTILINE)


def test_few_leases_are_listed_as_long_as_the_page_is_short() -> None:
    assert re.search("^l1 +alice", render(NODE, width=80, color=False, unicode=True, leases=False), re.MULTILINE)


def test_a_lease_of_several_devices_has_a_row_for_each() -> None:
    several = replace(LEASE, devices=(DEVICE, replace(DEVICE, gpu_index=3, placement=Placement(4, 4))), unused=False)
    page = render(replace(NODE, leases=(several,)), width=80, color=False, unicode=True, cut=True)
    assert re.search(r"^l1 +alice +0 +0 +1g.10gb", page, re.MULTILINE)
    assert re.search(r"^ +3 +4-7 +1g.10gb$", page, re.MULTILINE)


def test_nothing_fits_a_full_node_and_an_older_agent_does_not_tell() -> None:
    full = tuple(replace(each, count=0) for each in busy().available)
    assert "fits now: nothing" in render(replace(NODE, available=full), width=80, color=False, unicode=True)
    assert "fits now" not in render(NODE, width=80, color=False, unicode=True)


def test_a_deadline_is_shown_to_the_nearest_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert until(1000.0 + 7199.9) == "2h"
    assert until(1000.98) == "1s"
    assert until(1000.1) == "1s"
    assert until(1000.0) == "now"
    assert until(None) == "-"


def test_status_says_that_no_lease_can_be_written_down() -> None:
    page = render(replace(NODE, ledger_error="the disk is full"), width=80, color=False, unicode=True)
    assert "the disk is full" in page


def test_what_holders_are_called_cannot_break_the_page() -> None:
    """Names come from whoever asks."""
    wild = replace(LEASE, holder="a\x1b[31m\nb")
    page = render(replace(NODE, leases=(wild,)), width=80, color=False, unicode=True)
    assert "\x1b" not in page
    assert len(page.splitlines()) == len(render(NODE, width=80, color=False, unicode=True).splitlines())


def test_top_in_json_has_null_for_the_unknown() -> None:
    answer = to_json.top(NODE, {})
    assert isinstance(answer, dict)
    instances = answer["instances"]
    assert isinstance(instances, list)
    assert isinstance(instances[0], dict)
    assert instances[0]["usage"] == {
        "memory_used_mib": None,
        "memory_total_mib": None,
        "utilization_percent": None,
        "processes": None,
        "compute": None,
    }
    assert instances[0]["unused"] is True


def test_tables_have_straight_columns() -> None:
    lines = table(("A", "LONGER"), [("xxxx", "1"), ("y", "2")]).splitlines()
    assert lines == ["A     LONGER", "xxxx  1", "y     2"]


@pytest.mark.parametrize(
    ("mib", "words"),
    [(0, "0 MiB"), (1023, "1023 MiB"), (1024, "1 GiB"), (9984, "9.75 GiB"), (4864, "4.75 GiB"), (9_999, "9.76 GiB")],
)
def test_memory_for_people(mib: int, words: str) -> None:
    assert format_mib(mib) == words


def test_places_for_people() -> None:
    assert slices(Placement(0, 2)) == "slices 0-1"
    assert place(1, Placement(4, 1)) == "GPU 1, slice 4"
    assert place(1, None) == "GPU 1"


@pytest.mark.parametrize(
    ("at", "text"),
    [(0.0, "1970-01-01T00:00:00.000Z"), (1763726400.5, "2025-11-21T12:00:00.500Z"), (None, None), (1e300, None)],
)
def test_moments_for_programs(at: float | None, text: str | None) -> None:
    assert to_json.moment(at) == text


def test_the_documented_shapes() -> None:
    """The keys that design and documentation promise; there may be more."""
    answer = to_json.encode(NODE)
    assert isinstance(answer, dict)
    assert {"node", "revision", "gpus", "leases", "queue"} <= set(answer)
    gpu = to_json.encode(GPU)
    assert isinstance(gpu, dict)
    assert {"index", "uuid", "model", "mig", "state", "memory_slices", "instances"} <= set(gpu)
    instance = to_json.encode(LEASED)
    assert isinstance(instance, dict)
    assert {"uuid", "profile", "memory_mib", "placement", "gpu_instance_id", "compute_instance_id", "state"} | {
        "lease",
        "holder",
        "tenant",
        "since",
    } <= set(instance)
    device = to_json.encode(DEVICE)
    assert device == {
        "uuid": "MIG-1",
        "gpu": "GPU-1",
        "gpu_index": 0,
        "profile": "1g.10gb",
        "memory_mib": 9984,
        "placement": {"start": 0, "size": 1},
        "gpu_instance_id": 7,
        "compute_instance_id": 0,
        "reused": False,
    }


HOUR = 3600.0
ROW = AccountRow(
    key="team-a",
    leases=3,
    devices=4,
    memory_mib_seconds=2048 * 50 * HOUR,
    slice_seconds=50 * HOUR,
    waited_seconds=90.0,
    measured_mib_seconds=2048 * 50 * HOUR,
    peak_mib_seconds=2048 * 5 * HOUR,
)
UNMEASURED = replace(ROW, key='=cmd, "b"', measured_mib_seconds=0.0, peak_mib_seconds=None)


def test_an_account_is_a_table_in_which_what_is_unknown_is_no_number() -> None:
    half = replace(ROW, key="half", measured_mib_seconds=ROW.measured_mib_seconds / 2)
    account = Account(rows=(ROW, UNMEASURED, half), total=ROW, since=5.0, until=9.0, complete_since=7.0)
    lines = usage.render(account, "tenant").splitlines()
    assert lines[0].split() == ["TENANT", "LEASES", "GIB-HOURS", "SLICE-HOURS", "PEAK", "WAITED"]
    assert lines[1].split() == ["team-a", "3", "100.0", "50.0", "10%", "1m30s"]
    assert lines[2].split()[-2] == "?"
    assert lines[3].split()[-2] == "20%*"
    assert lines[4].split()[0] == "total"
    assert lines[-2] == "* of the part whose use was measured"
    assert lines[-1].startswith("The records begin at ")
    assert "records begin" not in usage.render(replace(account, since=8.0), "tenant")
    assert usage.render(account, "profile").splitlines()[1].split()[1] == "4"
    assert usage.render(replace(account, rows=(), since=8.0), "user") == "no leases"


def test_an_account_as_csv() -> None:
    account = Account(rows=(ROW, UNMEASURED), total=ROW, since=5.0, until=9.0, complete_since=None)
    assert usage.render_csv(account, "tenant").splitlines() == [
        "tenant,leases,devices,gib_hours,slice_hours,waited_hours,measured_gib_hours,peak_gib_hours",
        "team-a,3,4,100.000000,50.000000,0.025000,100.000000,10.000000",
        '"=cmd, ""b""",3,4,100.000000,50.000000,0.025000,0.000000,',
    ]


def test_a_moment_is_a_time_ago_or_a_date() -> None:
    assert moment("1h30m", 10_000.0) == 4600.0
    assert moment("2026-01-31", 0.0) == time.mktime((2026, 1, 31, 0, 0, 0, 0, 0, -1))
    for wrong in ("2026-13-01", "yesterday", "7"):
        with pytest.raises(UsageError, match="cannot"):
            moment(wrong, 0.0)


@pytest.mark.parametrize(
    ("instances", "deadline", "words"),
    [
        ((), None, "GPU 0 is drained: nothing is leased there"),
        ((), -5.0, "GPU 0 is drained: nothing is leased there"),
        ((LEASED,), None, "GPU 0 is being drained: it is empty when its leases end"),
        ((LEASED,), 7200.0, "GPU 0 is being drained: it is empty in 2h at the latest"),
        ((LEASED,), -5.0, "GPU 0 is being drained: its deadline is over, and 1 lease is still there"),
        ((LEASED, LEASED), -5.0, "GPU 0 is being drained: its deadline is over, and 1 lease is still there"),
    ],
)
def test_how_far_a_drain_is(instances: tuple[Instance, ...], deadline: float | None, words: str) -> None:
    gpu = replace(
        NODE.gpus[0],
        instances=instances,
        draining=True,
        drain_deadline=None if deadline is None else time.time() + deadline,
    )
    shown = render_page(replace(NODE, gpus=(gpu,)), Page(width=120, color=False, unicode=False, cut=False))
    assert words in shown.splitlines(), shown


def test_a_drain_is_said_once() -> None:
    gpu = replace(GPU, state="cordoned", reason="drained by root: new driver", draining=True, instances=(LEASED,))
    page = render(replace(NODE, gpus=(gpu,)), width=80, color=False, unicode=True)
    assert "GPU 0 is being drained by root: new driver; it is empty when its leases end" in page.splitlines()
    assert "is cordoned" not in page


def test_advice_says_that_names_are_left_out() -> None:
    each = Advice(
        name="train",
        user="alice",
        verdict="too-few-runs",
        message="train: too few",
        runs=2,
        measured_runs=1,
        asked="20G",
        peak_mib=None,
        suggestion="",
        replayed=0,
        waited_seconds=None,
        waited_less_seconds=None,
    )
    assert advise.MOST_NAMES == MOST_CASES
    assert advise.render([each] * 9, "").count("\n") == 8
    assert "The 10 names that leased the most; `migctl advise --name NAME`" in advise.render([each] * 10, "")
