"""What the kubelet writes and says: its checkpoint, and the words when it is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.adapters.kubelet import (
    CheckpointEntry,
    DeviceCheckpoint,
    Identity,
    KubeletError,
    KubeletPaths,
    PodResources,
)
from mig_agent.adapters.kubelet.checkpoint import _entries
from mig_agent.adapters.kubelet.registration import one_line
from mig_agent.core.owner import KubeletDevice

# As a kubelet 1.36 wrote it, shortened.
CHECKPOINT = {
    "Data": {
        "PodDeviceEntries": [
            {
                "PodUID": "2f6e6d8e-8f2a-4a0b-9d55-7d7c5a7d3f10",
                "ContainerName": "main",
                "ResourceName": "nvidia.com/mig-1g.10gb",
                "DeviceIDs": {"-1": ["mig-agent-0", "mig-agent-3"]},
                "AllocResp": "QiEKH21pZw==",
            },
            {
                "PodUID": "2f6e6d8e-8f2a-4a0b-9d55-7d7c5a7d3f10",
                "ContainerName": "prepare",
                "ResourceName": "example.com/nic",
                "DeviceIDs": {"0": ["eth0"], "1": ["eth1"]},
                "AllocResp": "",
            },
        ],
        "RegisteredDevices": {"nvidia.com/mig-1g.10gb": ["mig-agent-0", "mig-agent-3"]},
    },
    "Checksum": 2215103124,
}


def write(folder: Path, text: str) -> DeviceCheckpoint:
    paths = KubeletPaths(folder)
    paths.plugins.mkdir()
    paths.checkpoint.write_text(text)
    return DeviceCheckpoint(paths)


def test_the_checkpoint_of_a_kubelet(tmp_path: Path) -> None:
    uid = "2f6e6d8e-8f2a-4a0b-9d55-7d7c5a7d3f10"
    assert write(tmp_path, json.dumps(CHECKPOINT)).read() == (
        CheckpointEntry(
            pod_uid=uid,
            container="main",
            devices=(
                KubeletDevice(resource="nvidia.com/mig-1g.10gb", id="mig-agent-0"),
                KubeletDevice(resource="nvidia.com/mig-1g.10gb", id="mig-agent-3"),
            ),
        ),
        CheckpointEntry(
            pod_uid=uid,
            container="prepare",
            devices=(
                KubeletDevice(resource="example.com/nic", id="eth0"),
                KubeletDevice(resource="example.com/nic", id="eth1"),
            ),
        ),
    )


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "7", '{"Data": 3}', '{"Data": {"PodDeviceEntries": {}}}'])
def test_a_damaged_checkpoint_says_nothing(tmp_path: Path, text: str) -> None:
    assert write(tmp_path, text).read() == ()


def test_no_checkpoint_says_nothing(tmp_path: Path) -> None:
    assert DeviceCheckpoint(KubeletPaths(tmp_path)).read() == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.dictionaries(st.sampled_from(["PodUID", "ContainerName", "ResourceName", "DeviceIDs"]), JSON)


@given(st.one_of(JSON, st.lists(ENTRY).map(lambda entries: {"Data": {"PodDeviceEntries": entries}})))
def test_whatever_it_holds_it_can_be_read(content: object) -> None:
    for entry in _entries(content):
        assert isinstance(entry.pod_uid, str)


def test_a_file_in_the_place_of_another_is_another(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.sock"
    assert Identity.of(path) is None
    path.touch()
    first = Identity.of(path)
    assert first == Identity.of(path) is not None
    _made(tmp_path / "new").replace(path)
    assert Identity.of(path) != first


def _made(path: Path) -> Path:
    path.touch()
    return path


async def test_a_kubelet_that_is_not_there(tmp_path: Path) -> None:
    kubelet = PodResources(KubeletPaths(tmp_path))
    try:
        assert kubelet.kubelet is None
        with pytest.raises(KubeletError, match=r"cannot list the pods of this node: there is no .*kubelet\.sock"):
            await kubelet.list()
        with pytest.raises(KubeletError, match="cannot tell who serves"):
            await kubelet.allocatable()
    finally:
        await kubelet.close()


@given(st.text(max_size=900))
def test_words_of_others_fit_on_a_line(text: str) -> None:
    found = one_line(text)
    assert len(found) <= 300
    assert found.isprintable()
