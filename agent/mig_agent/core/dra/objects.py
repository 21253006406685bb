"""Slices as objects of the API server (`resource.k8s.io/v1`, ResourceSlice), and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, TypedDict

from mig_agent.core.dra.counters import CounterSet
from mig_agent.core.dra.devices import PartitionableDevice
from mig_agent.core.dra.names import DRIVER, pool_name
from mig_agent.core.dra.pool import ResourceSlice
from mig_agent.core.dra.relisting import PublishedSlice
from mig_agent.core.model import Engines, GpuUuid, Placement
from mig_agent.core.quantities import parse_memory

API_VERSION: Final = "resource.k8s.io/v1"
KIND: Final = "ResourceSlice"
_ENGINES: Final = ("multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines")
"""NVIDIA's names of the capacities, in the order of the fields of `Engines`."""
_MIB: Final = "Mi"


_Attribute = TypedDict("_Attribute", {"string": str, "int": int}, total=False)  # noqa: UP013 -- `int: int` would hide it


class _Value(TypedDict):
    value: str


class _Consumption(TypedDict):
    counterSet: str
    counters: Mapping[str, _Value]


class DeviceObject(TypedDict):
    """A device in a slice's `spec`."""

    name: str
    attributes: Mapping[str, _Attribute]
    capacity: Mapping[str, _Value]
    consumesCounters: Sequence[_Consumption]


class CounterSetObject(TypedDict):
    """A counter set in a slice's `spec`."""

    name: str
    counters: Mapping[str, _Value]


class PoolObject(TypedDict):
    """The pool in a slice's `spec`."""

    name: str
    generation: int
    resourceSliceCount: int


class SliceSpec(TypedDict, total=False):
    """The `spec` of a slice; the API server drops fields whose feature gate is off."""

    driver: str
    nodeName: str
    pool: PoolObject
    devices: Sequence[DeviceObject]
    sharedCounters: Sequence[CounterSetObject]


class NodeReference(NamedTuple):
    """The Node object that owns a node's slices, so that they are deleted with it."""

    name: str
    uid: str


class _OwnerReference(TypedDict):
    apiVersion: str
    kind: str
    name: str
    uid: str


class SliceMetadata(TypedDict, total=False):
    """The `metadata` of a slice."""

    name: str
    ownerReferences: Sequence[_OwnerReference]
    resourceVersion: str


class SliceObject(TypedDict):
    """A ResourceSlice."""

    apiVersion: str
    kind: str
    metadata: SliceMetadata
    spec: SliceSpec


_Amounts: TypeAlias = tuple[tuple[str, int], ...]


def slice_object(published: PublishedSlice, node: NodeReference) -> SliceObject:
    """Return a slice as the API server takes it."""
    content = published.content
    spec: SliceSpec = {
        "driver": DRIVER,
        "nodeName": node.name,
        "pool": {
            "name": pool_name(node.name),
            "generation": published.generation,
            "resourceSliceCount": published.slice_count,
        },
    }
    if content.counter_sets:
        spec["sharedCounters"] = [
            {"name": each.name, "counters": _counters(each.available)} for each in content.counter_sets
        ]
    else:
        spec["devices"] = [_device_object(each) for each in content.devices]
    owner: _OwnerReference = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": published.object_name, "ownerReferences": [owner]},
        "spec": spec,
    }


def read_slice(found: SliceObject) -> PublishedSlice:
    """Return a slice as the API server has it.

    Raises KeyError or ValueError if it is not one that `slice_object` wrote; counters that are missing, since the API
    server dropped them, are read as none.
    """
    spec = found["spec"]
    pool = spec["pool"]
    return PublishedSlice(
        content=ResourceSlice(
            name=found["metadata"]["name"].removesuffix(f"-{pool['generation']}"),
            devices=tuple(_device(each) for each in spec.get("devices") or ()),
            counter_sets=tuple(
                CounterSet(each["name"], _amounts(each["counters"])) for each in spec.get("sharedCounters") or ()
            ),
        ),
        generation=pool["generation"],
        slice_count=pool["resourceSliceCount"],
    )


def dropped_counters(written: PublishedSlice, answered: PublishedSlice) -> bool:
    """Return True if the API server dropped counters from what was written.

    It does so without an error while the feature gate DRAPartitionableDevices is off; devices without counters would
    be given out side by side on the same memory slices.
    """
    counted = {each.name: each.consumes for each in written.content.devices}
    kept = {each.name: each.consumes for each in answered.content.devices}
    return written.content.counter_sets != answered.content.counter_sets or counted != kept


def _device_object(device: PartitionableDevice) -> DeviceObject:
    capacity: dict[str, _Value] = {"memory": {"value": f"{device.memory_mib}{_MIB}"}}
    for name, amount in zip(_ENGINES, device.engines.as_tuple(), strict=True):
        capacity[name] = {"value": str(amount)}
    return {
        "name": device.name,
        "attributes": {
            "type": {"string": device.type},
            "profile": {"string": device.profile},
            "parentUUID": {"string": device.gpu},
            "productName": {"string": device.product_name},
            "computeSlices": {"int": device.compute_slices},
            "placementStart": {"int": device.placement.start},
            "placementSize": {"int": device.placement.size},
        },
        "capacity": capacity,
        "consumesCounters": [{"counterSet": device.counter_set, "counters": _counters(device.consumes)}],
    }


def _device(found: DeviceObject) -> PartitionableDevice:
    attributes, capacity = found["attributes"], found["capacity"]
    engines = [int(capacity[name]["value"]) for name in _ENGINES]
    taken = found.get("consumesCounters") or ()
    return PartitionableDevice(
        name=found["name"],
        gpu=GpuUuid(attributes["parentUUID"]["string"]),
        product_name=attributes["productName"]["string"],
        type=attributes["type"]["string"],
        profile=attributes["profile"]["string"],
        compute_slices=attributes["computeSlices"]["int"],
        memory_mib=_mib(capacity["memory"]["value"]),
        placement=Placement(attributes["placementStart"]["int"], attributes["placementSize"]["int"]),
        engines=Engines(
            multiprocessors=engines[0],
            copy=engines[1],
            decoders=engines[2],
            encoders=engines[3],
            jpeg=engines[4],
            ofa=engines[5],
        ),
        counter_set=taken[0]["counterSet"] if taken else "",
        consumes=_amounts(taken[0]["counters"]) if taken else (),
    )


def _counters(amounts: _Amounts) -> dict[str, _Value]:
    return {name: {"value": str(amount)} for name, amount in amounts}


def _amounts(counters: Mapping[str, _Value]) -> _Amounts:
    return tuple(sorted((name, int(each["value"])) for name, each in counters.items()))


def _mib(quantity: str) -> int:
    """Return a quantity of memory in MiB; the API server writes 40960Mi as 40Gi."""
    return parse_memory(quantity) >> 20
