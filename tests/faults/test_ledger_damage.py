"""The files of a ledger damaged in every way: it is opened whole, or it is set aside, kept and reported."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.ledger.commit_counter import SUFFIX
from mig_agent.adapters.ledger.lease_evidence import SUFFIX as EVIDENCE
from mig_agent.adapters.ledger.quarantine import MOST_KEPT, kept_aside
from mig_agent.adapters.ledger.reader import Contents
from mig_agent.adapters.ledger.records import (
    AddEvent,
    Change,
    DropInstance,
    EndLease,
    PutBootId,
    PutCordon,
    PutGpus,
    PutInstance,
    PutLease,
    RenewLease,
)
from mig_agent.adapters.ledger.store import LEDGER_FILE, Entry, Ledger
from mig_agent.adapters.tokens import KEY_FILE
from mig_agent.core.errors import LedgerError
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import (
    CallerId,
    Generation,
    GpuUuid,
    Holder,
    Instance,
    InstanceState,
    Lease,
    LeaseId,
    Placement,
    Profile,
    RequestId,
    Slot,
)
from mig_agent.core.owner import TOKEN_OWNER, StreamOwner
from support import forks
from support.figures import Figure

GPU = GpuUuid("GPU-1")
PROFILE = Profile(
    id=19, name="1g.5gb", compute_slices=1, memory_slices=1, memory_mib=4864, placements=(Placement(6, 1),)
)
ENDINGS = ("", "-wal", SUFFIX, EVIDENCE)
HUNDREDS = int(os.environ.get("LEDGER_DAMAGES", "300"))
PATIENCE_SECONDS = 60.0

Damage = Callable[[Path], None]


def instance(generation: int, state: InstanceState) -> Instance:
    return Instance(
        slot=Slot(GPU, PROFILE, Placement(generation % 7, 1)),
        generation=Generation(generation),
        state=state,
        gpu_instance_id=generation + 6,
        compute_instance_id=0,
        uuid=f"MIG-{generation:08}",
        since=5.0,
    )


def lease(number: int, *, hold: bool) -> Lease:
    return Lease(
        id=LeaseId(f"lease-{number}"),
        request_id=RequestId(f"request-{number}"),
        holder=Holder(tenant="team", name="alice", uid=1000, pid=77),
        instances=(Generation(number),),
        created_at=10.0 + number,
        owner=StreamOwner() if hold else TOKEN_OWNER,
        reused=(False,),
        caller_id=CallerId("uid 1000"),
    )


class Writing:
    """A record that is waited for."""

    def __init__(self, *changes: Change) -> None:
        self.record = changes
        self.done = threading.Event()


def settled(entries: Sequence[Entry], error: LedgerError | None) -> None:
    assert error is None
    for each in entries:
        assert isinstance(each, Writing)
        each.done.set()


def never(*, closing: bool) -> None:
    """In place of folding the log in."""


def fill(path: Path, first: int, last: int) -> None:
    """Leases, held leases, an instance that is being created, ended leases, a cordon, events; left as by a kill."""
    ledger = Ledger.open(path)
    ledger._checkpoint = never  # type: ignore[method-assign] # it is killed before
    ledger.start(settled)

    def write(*changes: Change) -> None:
        entry = Writing(*changes)
        ledger.submit(entry)
        assert entry.done.wait(PATIENCE_SECONDS)

    for number in range(first, last):
        state = InstanceState.CREATING if number % 5 == 4 else InstanceState.LEASED
        write(PutInstance(instance(number, state)))
        if state is InstanceState.LEASED:
            write(PutLease(lease(number, hold=number % 2 == 0), "digest"))
        if number % 7 == 6:
            write(EndLease(LeaseId(f"lease-{number}"), 99.0, "released"))
        if number % 3 == 1:
            write(RenewLease(LeaseId(f"lease-{number}"), 123.0))
        told = Event(kind=EventKind.LEASE_GRANTED, at=1.0, revision=number, message="granted", data={"a": 1})
        write(AddEvent(told), PutBootId("boot"))
    write(PutCordon(GPU, "fan", 7.0), PutGpus({GPU: '{"a": 1}'}))
    write(DropInstance(Generation(9)))
    kept = path.with_name("kept")
    kept.mkdir()
    for each in files(path):
        shutil.copy(each, kept / each.name)
    ledger.close()
    for each in files(path):
        each.unlink()
    for each in kept.iterdir():
        if not each.name.endswith("-shm"):
            shutil.copy(each, path.with_name(each.name))
    shutil.rmtree(kept)


def files(path: Path) -> list[Path]:
    return [each for each in path.parent.iterdir() if each.is_file() and each.name.startswith(path.name)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger in the file and in its log, with another one and older copies: folded in, and while its log grew."""
    folder = tmp_path_factory.mktemp("made")
    ledger = folder / "ledger" / LEDGER_FILE
    for each in ("ledger", "older", "another"):
        (folder / each).mkdir()
    fill(ledger, 0, 40)
    Ledger.open(ledger).close()  # folds the log in
    shutil.copytree(folder / "ledger", folder / "older", dirs_exist_ok=True)
    fill(ledger, 40, 50)
    shutil.copytree(folder / "ledger", folder / "earlier")
    fill(ledger, 50, 60)
    assert ledger.read_bytes() == (folder / "earlier" / LEDGER_FILE).read_bytes()  # the log was not folded in since
    fill(folder / "another" / LEDGER_FILE, 0, 50)
    assert {each.name for each in files(ledger)} == {LEDGER_FILE + ending for ending in ENDINGS}
    return folder


def opened(path: Path) -> Contents:
    """As the next start finds it."""
    ledger = Ledger.open(path)
    events = ledger.events(0.0)
    ledger.close()
    assert all(event.message for event in events)
    return ledger.contents


@pytest.fixture
def ledger(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "ledger", tmp_path, dirs_exist_ok=True)
    return tmp_path / LEDGER_FILE


def whole(made: Path) -> Contents:
    folder = made / "whole"
    if not folder.exists():
        shutil.copytree(made / "ledger", folder)
        assert opened(folder / LEDGER_FILE).doubt is None
    return opened(folder / LEDGER_FILE)


def devices(contents: Contents) -> dict[Lease, tuple[str, ...]]:
    """The leases that stand, with the UUIDs of their devices."""
    uuids = {each.generation: each.uuid for each in contents.instances}
    return {
        each.lease: tuple(uuids[generation] for generation in each.lease.instances)
        for each in contents.leases
        if each.ended_at is None
    }


def part(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def cut(ending: str, size: Callable[[int], int]) -> Damage:
    def damage(path: Path) -> None:
        os.truncate(part(path, ending), size(part(path, ending).stat().st_size))

    return damage


def replaced(ending: str, pattern: bytes, new: bytes) -> Damage:
    def damage(path: Path) -> None:
        data = part(path, ending).read_bytes()
        assert pattern in data
        part(path, ending).write_bytes(data.replace(pattern, new))

    return damage


def overwritten(ending: str, offset: int, data: bytes) -> Damage:
    def damage(path: Path) -> None:
        with part(path, ending).open("r+b") as file:
            file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
            file.write(data)

    return damage


def gone(*endings: str) -> Damage:
    def damage(path: Path) -> None:
        for ending in endings:
            part(path, ending).unlink()

    return damage


def put_back(made: str, *endings: str) -> Damage:
    """An older copy, or another ledger."""

    def damage(path: Path) -> None:
        for ending in endings:
            source = part(path.parents[1] / "made" / made / LEDGER_FILE, ending)
            part(path, ending).unlink(missing_ok=True)
            if source.exists():
                shutil.copy(source, part(path, ending))

    return damage


def zeroed(ending: str) -> Damage:
    def damage(path: Path) -> None:
        part(path, ending).write_bytes(bytes(part(path, ending).stat().st_size))

    return damage


def folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def all_gone_but_the_key(path: Path) -> None:
    path.with_name(KEY_FILE).write_bytes(b"k" * 32)
    gone(*ENDINGS)(path)


DAMAGES: dict[str, Damage] = {
    "text that is no UTF-8": replaced("", b"MIG-0", b"\xffIG-0"),
    "text that is UTF-8 as well": replaced("", b"MIG-0", b"MIH-0"),
    "a list that is none": replaced("", b"[[1, false]]", b"[[1, fals!]]"),
    "a list with another instance": replaced("", b"[[1, false]]", b"[[2, false]]"),
    "least_reader": replaced("", b"least_reader2", b"least_readerx"),
    "least_reader of the future": replaced("", b"least_reader2", b"least_reader9"),
    "another tenant": replaced("", b"team", b"tram"),
    "another state": replaced("", b"creating", b"present\0"),
    "the schema": replaced("", b"holder_uid INTEGER", b"holder_uid INTEGES"),
    "the magic number": overwritten("", 0, b"s"),
    "the way of writing": overwritten("", 18, b"\x07"),
    "the way of reading": overwritten("", 19, b"\x07"),
    "the number of pages": overwritten("", 28, b"\x00\x00\x00\x02"),
    "the application": overwritten("", 68, b"NOPE"),
    "the version": overwritten("", 60, b"\x00\x00\x00\x00"),
    "a version of never": overwritten("", 60, b"\x7f\x00\x00\x00"),
    "the file is empty": cut("", lambda _: 0),
    "the file is its header": cut("", lambda _: 100),
    "the file is halved": cut("", lambda size: size // 2),
    "the last page is missing": cut("", lambda size: size - 1024),
    "the last byte is missing": cut("", lambda size: size - 1),
    "the last page is rubbish": overwritten("", -1024, b"\xa5" * 1024),
    "the file is gone": gone(""),
    "the file is zeros": zeroed(""),
    "a folder in its place": folder_in_its_place,
    "the log is gone": gone("-wal"),
    "the log is empty": cut("-wal", lambda _: 0),
    "the log is halved": cut("-wal", lambda size: size // 2),
    "the last frame of the log is missing": cut("-wal", lambda size: size - 1048),
    "the log is zeros": zeroed("-wal"),
    "the head of the log": overwritten("-wal", 0, b"\0\0\0\0"),
    "the salt of the log": overwritten("-wal", 16, b"\0\0\0\0"),
    "a byte of the log": overwritten("-wal", 2000, b"\0\0\0\0\xff"),
    "an older copy": put_back("older", "", "-wal"),
    "an older file with its log": put_back("older", ""),
    "another ledger": put_back("another", "", "-wal"),
    "another ledger's counter": put_back("another", SUFFIX),
    "another ledger's log": put_back("another", "-wal"),
    "an older log with its counter": put_back("earlier", "-wal", SUFFIX),
    "the counter is gone": gone(SUFFIX),
    "the counter is empty": cut(SUFFIX, lambda _: 0),
    "the counter is cut": cut(SUFFIX, lambda size: size - 1),
    "the counter is rubbish": overwritten(SUFFIX, 9, b"x"),
    "the counter is zeros": zeroed(SUFFIX),
    "only the counter is left": gone("", "-wal"),
    "only the log is left": gone("", SUFFIX),
    "all is gone but the key": all_gone_but_the_key,
}


WITHOUT_EVIDENCE = frozenset({"another ledger's counter", "all is gone but the key"})
"""After which no lease comes back by its token: what the evidence says cannot be known to be the last."""
OF_THE_LOG = frozenset(name for name in DAMAGES if "log" in name)


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("folded", [False, True], ids=["with its log", "folded in"])
def test_a_damaged_ledger_is_set_aside_and_an_empty_one_says_so(
    made: Path, tmp_path: Path, name: str, *, folded: bool
) -> None:
    (tmp_path / "made").symlink_to(made)
    folder = tmp_path / "state"
    shutil.copytree(made / "ledger", folder)
    path = folder / LEDGER_FILE
    if folded:
        if name in OF_THE_LOG:
            pytest.skip("there is no log")
        opened(path)
        part(path, "-wal").write_bytes(b"")
    DAMAGES[name](path)
    found = {each.name: each.read_bytes() for each in files(path)}
    before = opened(path)
    if before.doubt is None:
        # What is damaged is in the log once more, whole.
        assert not folded
        assert before == whole(made)
        return
    assert not before.leases
    assert not before.instances
    expected = {} if name in WITHOUT_EVIDENCE else devices(whole(made))
    assert {each.lease: tuple(one and one.uuid for one in each.devices) for each in before.former} == expected
    assert before.last_generation > 1_000_000  # none that was given before is given again
    # What was there is kept as it was found, under one name.
    kept = {
        each.name: each.read_bytes() for each in files(path) if ".damaged-1" in each.name and "-shm" not in each.name
    }
    # SQLite makes and removes an empty log as it likes.
    kept = {name.replace(".damaged-1", ""): data for name, data in kept.items() if data or not name.endswith("-wal")}
    assert kept == {name: data for name, data in found.items() if data or not name.endswith("-wal")}
    if found:
        assert before.doubt.kept_as == f"{path}.damaged-1"
    # And the one that took its place is a ledger like any other, which goes on saying so.
    after = opened(path)
    assert after.doubt == before.doubt
    assert after.former == before.former
    assert list(kept_aside(path)) == ([1] if found else [])


def test_an_undamaged_ledger_is_whole_after_a_kill(made: Path, ledger: Path) -> None:
    contents = opened(ledger)
    assert contents.doubt is None
    assert contents == whole(made)
    assert len([each for each in contents.leases if each.ended_at is None]) > 30
    assert any(each.state is InstanceState.CREATING for each in contents.instances)


def test_a_damaged_event_costs_nothing_but_itself(ledger: Path) -> None:
    Ledger.open(ledger).close()
    with closing(sqlite3.connect(ledger)) as connection, connection:
        connection.execute("UPDATE event SET words = CAST(x'ff41' AS TEXT) WHERE number = 1")
        connection.execute("UPDATE event SET data = '{' WHERE number = 2")
        connection.execute("UPDATE event SET data = '[]', revision = 'x' WHERE number = 3")
        connection.execute("UPDATE event SET at = 'soon' WHERE number = 4")
    reader = Ledger.open(ledger)
    assert reader.contents.doubt is None
    assert [each.revision for each in reader.events(0.0)][:2] == [0, 4]
    reader.close()


def test_random_damage(made: Path, tmp_path: Path, figure: Figure) -> None:
    """Bits flipped, bytes overwritten, files cut, in any of the three files, one to three times."""
    draw = random.Random(4711)  # noqa: S311 -- the same damage each time
    expected, aside, back = whole(made), 0, 0
    for number in range(HUNDREDS):
        folder = tmp_path / str(number)
        shutil.copytree(made / "ledger", folder)
        path = folder / LEDGER_FILE
        path.with_name(KEY_FILE).write_bytes(b"k" * 32)
        if draw.random() < 0.5:
            opened(path)  # without a log, most of which is in the file twice
        done = [damaged(path, draw) for _ in range(draw.randint(1, 3))]
        contents = opened(path)
        if contents.doubt is None:
            assert contents == expected, (number, done)
        else:
            aside += 1
            assert (contents.leases, contents.instances) == ((), ()), (number, done)
            former = {each.lease: tuple(one and one.uuid for one in each.devices) for each in contents.former}
            assert former.items() <= devices(expected).items(), (number, done)
            back += bool(former)
            assert bool(kept_aside(path)) == bool(contents.doubt.kept_as), (number, done)
        shutil.rmtree(folder)
    assert aside > HUNDREDS // 3
    assert back > HUNDREDS // 10
    figure("ledgers damaged at random", HUNDREDS)


def damaged(path: Path, draw: random.Random) -> str:
    there = [
        part(path, ending) for ending in ENDINGS if part(path, ending).exists() and part(path, ending).stat().st_size
    ]
    if not there:
        return "nothing is left to damage"
    file = draw.choice(there)
    size = file.stat().st_size
    kind = draw.choice(["bit", "bit", "bit", "byte", "block", "cut", "gone", "longer"])
    position = draw.randrange(size)
    with file.open("r+b") as handle:
        if kind == "cut":
            handle.truncate(position)
        elif kind == "longer":
            handle.seek(0, os.SEEK_END)
            handle.write(draw.randbytes(draw.randint(1, 5000)))
        else:
            handle.seek(position)
            old = handle.read(1)
            handle.seek(position)
            if kind == "bit":
                handle.write(bytes([old[0] ^ 1 << draw.randrange(8)]))
            else:
                handle.write(draw.randbytes(1 if kind == "byte" else draw.randint(1, 3000)))
    if kind == "gone":
        file.unlink()
    return f"{file.name} {kind} {position}"


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    for number in range(MOST_KEPT + 4):
        path.write_bytes(b"damage %d" % number)
        Ledger.open(path).close()
    assert list(kept_aside(path)) == [1, *range(6, MOST_KEPT + 5)]
    assert path.with_name(f"{LEDGER_FILE}.damaged-1").read_bytes() == b"damage 0"


# Killed on the way

SCRIPT = """
import sys
from pathlib import Path
from mig_agent.adapters.ledger.store import Ledger
from mig_agent.core.owner import StreamOwner, TOKEN_OWNER
Ledger.open(Path(sys.argv[1])).close()
"""


def places_of(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reached: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(FAILPOINTS, "listener", reached.append)
        Ledger.open(ledger).close()
    return reached


@pytest.mark.parametrize("damage", ["the log is halved", "the file is empty", "only the counter is left", ""])
def test_killed_at_every_step_of_setting_aside(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, figure: Figure
) -> None:
    """Of a first start, too. What was there is kept together, and that it was is not forgotten."""

    def fresh(name: str) -> Path:
        path = tmp_path / name / LEDGER_FILE
        if damage:
            shutil.copytree(made / "ledger", path.parent)
            DAMAGES[damage](path)
        else:
            path.parent.mkdir()
        return path

    example = fresh("example")
    found = {each.name: each.read_bytes() for each in files(example)}
    places = places_of(example, monkeypatch)
    expected_back = bool(damage)
    counts: dict[str, int] = {}
    for number, place in enumerate(places):
        counts[place] = counts.get(place, 0) + 1
        path = fresh(str(number))
        armed = {**os.environ, "MIG_AGENT_CRASH_AT": f"{place}:{counts[place]}"}
        done = forks.run("-c", SCRIPT, str(path), env=armed)
        assert done.returncode == -signal.SIGKILL, (place, done.stderr)
        contents = opened(path)
        assert (contents.doubt is not None) == bool(damage), place
        kept = {
            each.name.replace(".damaged-1", ""): each.read_bytes()
            for each in files(path)
            if ".damaged-" in each.name and "-shm" not in each.name
        }
        assert kept == found, place
        assert {each.name for each in path.parent.iterdir() if ".damaged-" not in each.name} <= {
            LEDGER_FILE + ending for ending in (*ENDINGS, "-shm")
        }, place
        assert opened(path).doubt == contents.doubt
        assert {each.lease for each in contents.former} == (set(devices(whole(made))) if expected_back else set()), (
            place
        )
    figure("kills while a ledger is made or set aside", len(places))


def test_killed_between_a_commit_and_its_counter(tmp_path: Path) -> None:
    """The ledger is ahead of its counter then, which is as it should be."""
    script = f"""
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from test_ledger_damage import Ledger, PutBootId, Writing
ledger = Ledger.open(Path({str(tmp_path / LEDGER_FILE)!r}))
write, left = os.pwrite, [5]
def killed(*arguments):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)
os.pwrite = killed
ledger.start(lambda entries, error: print(*(each.record[0].boot_id for each in entries), flush=True))
import time
for number in range(1, 10):
    ledger.submit(Writing(PutBootId(str(number))))
    time.sleep(0.05)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    contents = opened(tmp_path / LEDGER_FILE)
    assert contents.doubt is None
    assert int(contents.boot_id) >= len(done.stdout.split()) + 1


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "dangling link"])
@pytest.mark.parametrize("ending", ["", "-wal", "-shm", "-journal", SUFFIX])
def test_what_is_no_file_in_the_place_of_one_keeps_no_agent_waiting(ending: str, kind: str, tmp_path: Path) -> None:
    """To open a pipe takes until somebody else does: in a process of its own, which can be seen to end."""
    path = tmp_path / LEDGER_FILE
    fill(path, 1, 5)
    part = path.with_name(path.name + ending)
    if part.exists():
        part.rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").touch()
    match kind:
        case "pipe":
            os.mkfifo(part)
        case "folder":
            part.mkdir()
        case "link":
            part.symlink_to(tmp_path / "elsewhere")
        case _:
            part.symlink_to(tmp_path / "nowhere")
    script = (
        "import sys; from pathlib import Path; from mig_agent.adapters.ledger.store import Ledger;"
        " doubt = Ledger.open(Path(sys.argv[1])).contents.doubt; print(doubt.why if doubt else '')"
    )
    done = forks.run("-c", script, str(path), timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    if (ending, kind) == ("", "link"):  # to a whole ledger
        return
    assert done.stdout.startswith("was damaged: ")
    assert kept_aside(path)


def test_a_pipe_in_the_place_of_the_lease_evidence_does_not_block_the_agent(ledger: Path) -> None:
    part(ledger, EVIDENCE).unlink()
    os.mkfifo(part(ledger, EVIDENCE))
    script = (
        "import sys; from pathlib import Path; from mig_agent.adapters.ledger.store import Ledger;"
        " print(Ledger.open(Path(sys.argv[1])).contents.doubt)"
    )
    done = forks.run("-c", script, str(ledger), timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr


@pytest.mark.parametrize(
    "name", [f"{LEDGER_FILE}.replacing", f".{LEDGER_FILE}.replacing", f".{LEDGER_FILE}{SUFFIX}.new"]
)
def test_a_pipe_in_the_place_of_a_helping_file_keeps_no_agent_waiting(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    script = (
        "import sys; from pathlib import Path; from mig_agent.adapters.ledger.store import Ledger;"
        " Ledger.open(Path(sys.argv[1]))"
    )
    done = forks.run("-c", script, str(tmp_path / LEDGER_FILE), timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
