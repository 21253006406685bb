"""The owners of devices, by the kubelet's list and its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from mig_agent.adapters.kubelet import CheckpointEntry, ListedContainer, ListedPod
from mig_agent.core.model import Holder, Lease, LeaseId, RequestId
from mig_agent.core.owner import TOKEN_OWNER, KubeletDevice, Pod, PodOwner
from mig_agent.frontends.kubernetes.device_plugin.allocations import ContainerDevices, belongs_to, container_devices

SMALL, LARGE, FOREIGN = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb", "example.com/nic"
SERVED = (SMALL, LARGE)


def device(number: int, resource: str = SMALL) -> KubeletDevice:
    return KubeletDevice(resource=resource, id=f"mig-agent-{number}")


def listed(name: str, **containers: Sequence[KubeletDevice]) -> ListedPod:
    return ListedPod(
        namespace="team-a",
        name=name,
        containers=tuple(ListedContainer(name=each, devices=tuple(devices)) for each, devices in containers.items()),
    )


def entry(uid: str, container: str, *devices: KubeletDevice) -> CheckpointEntry:
    return CheckpointEntry(pod_uid=uid, container=container, devices=devices)


def claim(asked: Sequence[KubeletDevice], pods: Sequence[ListedPod], *recorded: CheckpointEntry) -> ContainerDevices:
    found = container_devices(asked, pods, recorded, SERVED)
    assert found is not None
    return found


def test_a_pod_is_found_with_all_that_it_was_given() -> None:
    nic = KubeletDevice(resource=FOREIGN, id="eth7")
    pods = [
        listed("other", main=[device(0)]),
        listed("train", plain=[], main=[device(1), nic, device(0, LARGE)], second=[device(2)]),
    ]
    found = claim([device(1)], pods, entry("uid-1", "main", device(1)))
    assert found.pod == Pod(namespace="team-a", name="train", uid="uid-1")
    assert found.container == "main"
    assert found.container_devices == (device(1), device(0, LARGE))
    assert set(found.devices) == {device(1), device(2), device(0, LARGE)}


def test_unlisted_devices_have_no_pod() -> None:
    assert (
        container_devices([device(5)], [listed("train", main=[device(1)])], [entry("uid-1", "main", device(1))], SERVED)
        is None
    )


def test_without_the_checkpoint_the_uid_is_not_known() -> None:
    assert claim([device(1)], [listed("train", main=[device(1)])]).pod == Pod(namespace="team-a", name="train")


def test_init_container_that_passes_on_its_device_belongs_to_the_listed_pod() -> None:
    pods = [listed("train", main=[device(1), device(2)])]
    recorded = (entry("uid-1", "main", device(1), device(2)), entry("uid-1", "prepare", device(1)))
    found = claim([device(1)], pods, *recorded)
    assert found.container == "prepare"
    assert found.container_devices == (device(1),), "no variable may name a device that it was not given"
    assert set(found.devices) == {device(1), device(2)}
    assert claim([device(1), device(2)], pods, *recorded).container == "main"


def test_init_container_is_found_by_the_devices_of_its_pods_other_containers() -> None:
    pods = [listed("other", main=[device(7)]), listed("train", main=[device(1)])]
    recorded = (entry("uid-1", "main", device(1)), entry("uid-1", "prepare", device(3, LARGE)))
    found = claim([device(3, LARGE)], pods, *recorded)
    assert found.pod == Pod(namespace="team-a", name="train", uid="uid-1")
    assert found.container_devices == (device(3, LARGE),)
    assert set(found.devices) == {device(1), device(3, LARGE)}


def test_pod_known_only_from_the_checkpoint_has_no_name_yet() -> None:
    found = claim([device(3)], [listed("train", main=[])], entry("uid-1", "prepare", device(3)))
    assert found.pod == Pod(namespace="", name="", uid="uid-1")
    assert found.devices == (device(3),)


def test_entries_of_other_pods_are_no_part_of_it() -> None:
    recorded = (entry("uid-1", "main", device(1)), entry("uid-gone", "main", device(2)))
    assert claim([device(1)], [listed("train", main=[device(1)])], *recorded).devices == (device(1),)


def test_of_two_containers_with_the_same_the_one_with_more_is_named_behind_what_is_asked() -> None:
    pods = [listed("train", main=[device(0, LARGE), device(1)])]
    recorded = (entry("uid-1", "prepare", device(1)), entry("uid-1", "main", device(1)))
    assert claim([device(1)], pods, *recorded).container_devices == (device(1), device(0, LARGE))


def lease_of(pod: Pod | None) -> Lease:
    return Lease(
        id=LeaseId("lease-1"),
        request_id=RequestId("r"),
        holder=Holder(),
        owner=TOKEN_OWNER if pod is None else PodOwner(pod=pod),
        instances=(),
        created_at=0.0,
    )


def test_a_lease_belongs_to_the_very_same_pod() -> None:
    pod = Pod(namespace="team-a", name="train-0", uid="uid-1")
    assert belongs_to(lease_of(pod), pod, ())
    assert belongs_to(lease_of(pod), Pod(namespace="team-a", name="train-0"), ()), "the name is all that is known"
    assert not belongs_to(lease_of(pod), Pod(namespace="team-a", name="train-0", uid="uid-2"), ())
    assert not belongs_to(lease_of(pod), Pod(namespace="team-b", name="train-0", uid="uid-1"), ())
    assert not belongs_to(lease_of(None), pod, ())
    assert not belongs_to(lease_of(pod), pod, {LeaseId("lease-1")}), "its end is certain already"
