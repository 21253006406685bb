"""Reports whether a change of `proto/` breaks a caller, by comparing the API with the one in `proto/api.txt`.

    hack/proto_compat.py check     0: as accepted; 1: it breaks a caller, or something new was not accepted yet
    hack/proto_compat.py accept    records the API; refuses if it breaks a caller

A change breaks a caller if a method, message, field, enum value or word is removed or renamed, or a field has another
number, type or shape. Adding breaks no caller. In a new package version (migagent.v2) everything is new.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor, ServiceDescriptor

import mig_agent.pb
from mig_agent.adapters.grpc_errors import STATUS, TRAILER
from mig_agent.core.errors import Reason
from mig_agent.core.events import EventKind

OTHERS = "mig_agent.pb.kubelet."
"""The API of others, which the agent uses to speak with the kubelet."""
ACCEPTED = Path(__file__).resolve().parent.parent / "proto" / "api.txt"
_HEADER = "# The API as it was accepted; written by hack/proto_compat.py. A line that goes away breaks a caller.\n"
_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


@dataclass(frozen=True)
class Difference:
    """Return what the current API lacks of the accepted one, and what is new."""

    gone: tuple[str, ...]
    new: tuple[str, ...]


def difference(accepted: Iterable[str], there: Iterable[str]) -> Difference:
    """Return the difference; both arguments are lines of `describe`."""
    before, after = set(accepted), set(there)
    return Difference(gone=tuple(sorted(before - after)), new=tuple(sorted(after - before)))


def api() -> list[str]:
    """Return the current API: all generated modules except those of others, and the reasons, events and trailer."""
    lines = [f"trailer {TRAILER}"]
    lines += [f"reason {each.value} {STATUS[each].name}" for each in Reason]
    lines += [f"event {each.value}" for each in EventKind]
    for module in pkgutil.walk_packages(mig_agent.pb.__path__, "mig_agent.pb."):
        if module.name.endswith("_pb2") and not module.name.startswith(OTHERS):
            lines += describe(importlib.import_module(module.name).DESCRIPTOR)
    return sorted(lines)


def describe(file: FileDescriptor) -> Iterator[str]:
    """Yield a line for each thing that a caller may rely on."""
    for service in file.services_by_name.values():
        yield from _service(service)
    for message in file.message_types_by_name.values():
        yield from _message(message)
    for enum in file.enum_types_by_name.values():
        yield from _enum(enum)


def _service(service: ServiceDescriptor) -> Iterator[str]:
    yield f"service {service.full_name}"
    for method in service.methods:
        takes = ("stream " if method.client_streaming else "") + method.input_type.full_name
        gives = ("stream " if method.server_streaming else "") + method.output_type.full_name
        yield f"rpc {method.full_name}({takes}) returns ({gives})"


def _message(message: Descriptor) -> Iterator[str]:
    yield f"message {message.full_name}"
    for field in message.fields:
        yield f"field {message.full_name} {field.number} {field.name} {_shape(field)}"
    for nested in message.nested_types:
        yield from _message(nested)
    for enum in message.enum_types:
        yield from _enum(enum)


def _enum(enum: EnumDescriptor) -> Iterator[str]:
    yield f"enum {enum.full_name}"
    for value in enum.values:
        yield f"value {enum.full_name} {value.number} {value.name}"


def _shape(field: FieldDescriptor) -> str:
    kind = _TYPES[field.type]
    if field.message_type is not None:
        kind = field.message_type.full_name
    elif field.enum_type is not None:
        kind = field.enum_type.full_name
    if field.is_repeated:
        return f"repeated {kind}"
    oneof = field.containing_oneof
    if oneof is not None and not oneof.name.startswith("_"):
        return f"{kind} in {oneof.name}"
    return f"optional {kind}" if field.has_presence and field.message_type is None else kind


def read(path: Path) -> list[str]:
    """Return the lines of an accepted API."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def main(arguments: list[str], accepted: Path = ACCEPTED) -> int:
    """Run the command and return the exit code."""
    if arguments not in (["check"], ["accept"]):
        print(__doc__, file=sys.stderr)
        return 2
    there = api()
    found = difference(read(accepted) if accepted.exists() else [], there)
    if found.gone:
        print("cannot accept proto/: it breaks those who call the API as it was:", file=sys.stderr)
        print("\n".join(f"  gone: {line}" for line in found.gone), file=sys.stderr)
        print("keep what was there, and add the new beside it; or make a new version of the package", file=sys.stderr)
        return 1
    if arguments == ["accept"]:
        accepted.write_text(_HEADER + "\n".join(there) + "\n", encoding="utf-8")
        return 0
    if found.new:
        print("cannot call proto/api.txt fresh; hack/proto_compat.py accept writes down what is new:", file=sys.stderr)
        print("\n".join(f"  new: {line}" for line in found.new), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
