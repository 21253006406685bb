"""What a pod asks for, counted as Kubernetes' scheduler counts it, and what that is in a request to an agent."""

from __future__ import annotations

import pytest

from mig_agent.core.pod_resources import Container, devices_of, pod_resources, requested
from mig_agent.core.requests import parse_device

SIDECAR = "Always"


def wanting(amount: int, restart: str | None = None) -> Container:
    return {"resources": {"limits": {"a.b/c": str(amount), "cpu": "2"}}, "restartPolicy": restart}


@pytest.mark.parametrize(
    ("init", "containers", "overhead", "expected"),
    [
        ([], [1, 2], 0, 3),
        ([4], [1, 2], 0, 4),
        ([1, 2], [1], 0, 2),
        ([(1, SIDECAR), 2], [1], 0, 3),
        ([2, (1, SIDECAR)], [1], 0, 2),
        ([(1, SIDECAR), (1, SIDECAR)], [1], 0, 3),
        ([(2, SIDECAR), 3, (1, SIDECAR)], [1], 0, 5),
        ([], [], 0, 0),
        ([], [1], 2, 3),
    ],
)
def test_pod_resources_are_counted_as_by_the_scheduler(
    init: list[int | tuple[int, str]], containers: list[int], overhead: int, expected: int
) -> None:
    counted = requested(
        {
            "initContainers": [wanting(*each) if isinstance(each, tuple) else wanting(each) for each in init] or None,
            "containers": [wanting(each) for each in containers],
            "overhead": {"a.b/c": str(overhead)} if overhead else None,
        }
    )
    assert counted == ({"a.b/c": expected} if expected else {})


def test_only_whole_numbers_of_extended_resources_are_read() -> None:
    container: Container = {
        "resources": {
            "requests": {"a.b/c": 1, "d.e/f": "0", "hugepages-2Mi": "4Mi"},
            "limits": {"a.b/c": "1", "g/h": "1k"},
        }
    }
    assert requested({"containers": [container, {"resources": None}, {}]}) == {"a.b/c": 1}


def test_of_a_pod_the_agents_resources_are_the_devices_of_a_request() -> None:
    limits = {"mig-agent.io/memory-5g": "2", "nvidia.com/mig-1g.10gb": "1", "cpu": "1", "vendor.example/nic": "1"}
    resources = pod_resources({"containers": [{"resources": {"limits": limits}}]})
    assert resources == {"mig-agent.io/memory-5g": 2, "nvidia.com/mig-1g.10gb": 1}
    assert devices_of(resources) == ["5G", "5G", "1g.10gb"]


@pytest.mark.parametrize(
    ("resource", "device"),
    [
        ("nvidia.com/mig-1g.10gb", "1g.10gb"),
        ("nvidia.com/mig-1g.10gb.me", "1g.10gb+me"),
        ("nvidia.com/mig-1g.24gb.me.all", "1g.24gb+me.all"),
        ("nvidia.com/mig-2g.48gb.gfx", "2g.48gb+gfx"),
        ("nvidia.com/mig-2g.48gb-me", "2g.48gb-me"),
        ("mig-agent.io/memory-80g", "80G"),
    ],
)
def test_a_resource_is_a_device_that_agents_understand(resource: str, device: str) -> None:
    assert devices_of({resource: 1}) == [device]
    assert parse_device(device).text == device


def test_agents_may_call_their_resources_otherwise() -> None:
    limits = {"example.com/gpu-1g.10gb": "1", "example.com/memory-5g": "1", "nvidia.com/mig-1g.10gb": "1"}
    names = {"profiles": "example.com/gpu-", "memory": "example.com/memory-"}
    found = pod_resources({"containers": [{"resources": {"limits": limits}}]}, **names)
    assert devices_of(found, **names) == ["1g.10gb", "5G"]
