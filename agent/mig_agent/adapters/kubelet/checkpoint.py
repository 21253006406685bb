"""The kubelet's checkpoint of allocated devices, for what its pod resources API leaves out.

That API shows neither plain init containers nor the UIDs of pods. The file has no guaranteed format
(`devicemanager/checkpoint` in the kubelet's source), so entries that cannot be understood are skipped; no lease may end
because of an entry that is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mig_agent.adapters.kubelet.registration import KubeletPaths
from mig_agent.core.owner import KubeletDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """Devices of one resource allocated to one container.

    The kubelet keeps the entries of ended pods until its next allocation.
    """

    pod_uid: str
    container: str
    devices: tuple[KubeletDevice, ...]


class DeviceCheckpoint:
    """Reader of the kubelet's `kubelet_internal_checkpoint`."""

    def __init__(self, paths: KubeletPaths) -> None:
        self._path: Path = paths.checkpoint

    def read(self) -> tuple[CheckpointEntry, ...]:
        """Return the entries that can be understood; none if there is no file. Blocking, but quick."""
        try:
            content = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return ()
        return tuple(_entries(content))

    def registered(self) -> Mapping[str, frozenset[str]]:
        """Return the resources that device plugins serve, or served up to five minutes ago, with their healthy devices.

        A plugin that has gone leaves an empty set until the kubelet forgets it. The result is empty if the file is
        missing or cannot be understood. Blocking, but quick.
        """
        try:
            content = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        found = _data(content).get("RegisteredDevices")
        resources = found.items() if isinstance(found, dict) else ()
        return {name: frozenset(_ids(devices)) for name, devices in resources}


def _data(content: object) -> Mapping[str, object]:
    data = content.get("Data") if isinstance(content, dict) else None
    return data if isinstance(data, dict) else {}


def _entries(content: object) -> Iterator[CheckpointEntry]:
    entries = _data(content).get("PodDeviceEntries")
    for each in entries if isinstance(entries, list) else ():
        if not isinstance(each, dict):
            continue
        uid, container, resource = each.get("PodUID"), each.get("ContainerName"), each.get("ResourceName")
        if isinstance(uid, str) and isinstance(container, str) and isinstance(resource, str):
            devices = tuple(KubeletDevice(resource=resource, id=one) for one in _ids(each.get("DeviceIDs")))
            yield CheckpointEntry(pod_uid=uid, container=container, devices=devices)


def _ids(value: object) -> Iterator[str]:
    """Yield device ids, which the kubelet groups by NUMA node; before 1.20 they were a plain list."""
    lists = value.values() if isinstance(value, dict) else (value,)
    for each in lists:
        if isinstance(each, list):
            yield from (one for one in each if isinstance(one, str))
