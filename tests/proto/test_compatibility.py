"""What callers of the API rely on stays as it was; the check that sees to it is tested with changes that break them."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from mig_agent.core.errors import Reason
from mig_agent.core.events import EventKind
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
MADE = ROOT / "agent" / "mig_agent" / "pb"


def load_compat() -> ModuleType:
    spec = importlib.util.spec_from_file_location("proto_compat", ROOT / "hack" / "proto_compat.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


compat = load_compat()


def described(change: Callable[[FileDescriptorProto], None] = lambda _file: None) -> list[str]:
    """The API's own file after a change, as the check sees it."""
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    change(file)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return sorted(compat.describe(pool.FindFileByName(file.name)))


def message(file: FileDescriptorProto, name: str) -> int:
    return [each.name for each in file.message_type].index(name)


def field(file: FileDescriptorProto, owner: str, name: str) -> FieldDescriptorProto:
    fields = file.message_type[message(file, owner)].field
    return next(each for each in fields if each.name == name)


def remove_field(file: FileDescriptorProto) -> None:
    fields = file.message_type[message(file, "Granted")].field
    del fields[[each.name for each in fields].index("notes")]


def renumber_field(file: FileDescriptorProto) -> None:
    field(file, "Granted", "notes").number = 77


def rename_field(file: FileDescriptorProto) -> None:
    notes = field(file, "Granted", "notes")
    notes.name = notes.json_name = "remarks"


def retype_field(file: FileDescriptorProto) -> None:
    field(file, "Device", "memory_mib").type = FieldDescriptorProto.TYPE_INT32


def repeat_field(file: FileDescriptorProto) -> None:
    field(file, "Device", "uuid").label = FieldDescriptorProto.LABEL_REPEATED


def other_message(file: FileDescriptorProto) -> None:
    field(file, "Device", "placement").type_name = ".migagent.v1.MigMode"


def out_of_the_oneof(file: FileDescriptorProto) -> None:
    field(file, "PlanOutcome", "refusal").ClearField("oneof_index")


def remove_method(file: FileDescriptorProto) -> None:
    methods = file.service[0].method
    del methods[[each.name for each in methods].index("Renew")]


def stream_no_more(file: FileDescriptorProto) -> None:
    next(each for each in file.service[0].method if each.name == "Watch").server_streaming = False


def other_answer(file: FileDescriptorProto) -> None:
    next(each for each in file.service[0].method if each.name == "Renew").output_type = ".migagent.v1.Lease"


def rename_value(file: FileDescriptorProto) -> None:
    next(each for each in file.enum_type if each.name == "InstanceState").value[2].name = "INSTANCE_STATE_UNUSED"


def renumber_value(file: FileDescriptorProto) -> None:
    next(each for each in file.enum_type if each.name == "InstanceState").value[2].number = 42


@pytest.mark.parametrize(
    "change",
    [
        remove_field,
        renumber_field,
        rename_field,
        retype_field,
        repeat_field,
        other_message,
        out_of_the_oneof,
        remove_method,
        stream_no_more,
        other_answer,
        rename_value,
        renumber_value,
    ],
)
def test_a_change_that_breaks_a_caller_is_found(change: Callable[[FileDescriptorProto], None]) -> None:
    assert compat.difference(described(), described(change)).gone


def add_field(file: FileDescriptorProto) -> None:
    file.message_type[message(file, "Granted")].field.add(
        name="more", number=99, type=FieldDescriptorProto.TYPE_STRING, label=FieldDescriptorProto.LABEL_OPTIONAL
    )


def add_method(file: FileDescriptorProto) -> None:
    file.service[0].method.add(
        name="Explain", input_type=".migagent.v1.StatusRequest", output_type=".migagent.v1.StatusResponse"
    )


def add_value(file: FileDescriptorProto) -> None:
    next(each for each in file.enum_type if each.name == "InstanceState").value.add(
        name="INSTANCE_STATE_LENT", number=42
    )


@pytest.mark.parametrize("change", [add_field, add_method, add_value])
def test_an_addition_breaks_nobody_and_is_noticed(change: Callable[[FileDescriptorProto], None]) -> None:
    found = compat.difference(described(), described(change))
    assert not found.gone
    assert found.new


def test_the_api_is_as_accepted() -> None:
    assert compat.main(["check"]) == 0


def test_the_check_refuses_what_breaks_a_caller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accepted = tmp_path / "api.txt"
    accepted.write_text(compat.ACCEPTED.read_text() + "field migagent.v1.Lease 99 colour string\n")
    for command in ("check", "accept"):
        assert compat.main([command], accepted) == 1
        assert "gone: field migagent.v1.Lease 99 colour string" in capsys.readouterr().err
    assert "colour" in accepted.read_text(), "accept writes nothing that breaks a caller"


def test_what_is_new_has_to_be_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accepted = tmp_path / "api.txt"
    lines = compat.ACCEPTED.read_text().splitlines()
    accepted.write_text("\n".join(line for line in lines if "Renew(" not in line))
    assert compat.main(["check"], accepted) == 1
    assert "new: rpc migagent.v1.PartitionManager.Renew" in capsys.readouterr().err
    assert compat.main(["accept"], accepted) == 0
    assert compat.main(["check"], accepted) == 0


def test_the_generated_code_is_made_from_these_sources() -> None:
    """By checksum, since the tools that generate it are not at hand here; `hack/proto.sh --check` makes it again."""
    lines = (MADE / "MADE-FROM").read_text(encoding="utf-8").splitlines()
    recorded = {path: checksum for checksum, _, path in (line.partition("  ") for line in lines if "==" not in line)}
    there = {
        str(path.relative_to(PROTO)): hashlib.sha256(path.read_bytes()).hexdigest() for path in PROTO.rglob("*.proto")
    }
    assert recorded == there, "run hack/proto.sh"


def test_every_reason_is_documented_where_callers_look() -> None:
    words = (PROTO / "migagent" / "v1" / "partition_manager.proto").read_text(encoding="utf-8")
    documented = words.replace("\n  // ", " ")
    assert [each.value for each in Reason if each.value not in documented] == []


def test_words_are_words() -> None:
    for each in (*Reason, *EventKind):
        assert each.value == each.name.lower().replace("_", "-")
