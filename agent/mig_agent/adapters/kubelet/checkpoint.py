"""The kubelet's own record of the devices of its pods, for what its pod resources API does not show.

It shows neither plain init containers nor the UIDs of pods. The file has no promised form (`devicemanager/checkpoint`
in its source), so whatever cannot be understood is passed over; no lease may end for what it does not say.
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
    """What one container was given of one resource. The kubelet keeps those of ended pods until it allocates again."""

    pod_uid: str
    container: str
    devices: tuple[KubeletDevice, ...]


class DeviceCheckpoint:
    """Reads `kubelet_internal_checkpoint`."""

    def __init__(self, paths: KubeletPaths) -> None:
        self._path: Path = paths.checkpoint

    def read(self) -> tuple[CheckpointEntry, ...]:
        """The entries that can be understood; none where there is no file. Blocking, and quick."""
        try:
            content = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return ()
        return tuple(_entries(content))

    def registered(self) -> Mapping[str, frozenset[str]]:
        """The resources that device plugins serve, or served up to five minutes ago, with their healthy devices.

        Those of a plugin that has gone are without any until the kubelet forgets them. None where there is no file, or
        one that cannot be understood. Blocking, and quick.
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
    """By NUMA node; before 1.20 it was a plain list."""
    lists = value.values() if isinstance(value, dict) else (value,)
    for each in lists:
        if isinstance(each, list):
            yield from (one for one in each if isinstance(one, str))
