"""Which extended resources a node has, and how they are called."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given

from mig_agent.core.model import NodeView
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.frontends.kubernetes.resources import Naming, label_of, resources_of
from support.nodes import A100_40, H100, LAYOUTS, RTX_PRO, Has, Machine, node, nodes, whole
from support.owners import bound

NAME = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def names(view: NodeView, naming: Naming = Naming()) -> list[str]:  # noqa: B008 -- frozen
    return [each.name for each in resources_of(view, naming)]


def test_profiles_are_called_as_users_write_them() -> None:
    found = names(node(Machine(A100_40)))
    assert "nvidia.com/mig-1g.5gb" in found
    assert "nvidia.com/mig-1g.5gb.me" in found
    assert not any("+" in each for each in found)


def test_two_models_have_the_profiles_of_both_and_share_the_amounts_of_memory() -> None:
    found = names(node(Machine(A100_40), Machine(H100), Machine(H100)))
    assert len(found) == len(set(found))
    assert {"nvidia.com/mig-1g.5gb", "nvidia.com/mig-1g.10gb"} <= set(found)
    assert [each for each in found if "memory" in each] == [
        f"mig-agent.io/memory-{each}" for each in ("10g", "20g", "40g", "5g", "80g")
    ]


def test_an_amount_that_no_gpu_could_ever_serve_is_not_offered() -> None:
    found = names(node(Machine(A100_40)))
    assert "mig-agent.io/memory-20g" in found
    assert "mig-agent.io/memory-80g" not in found


def test_gpus_without_mig_mode_are_served_only_if_configured() -> None:
    view = node(whole())
    assert names(view) == []
    (found,) = resources_of(view, Naming(whole_gpu="nvidia.com/gpu"))
    assert found.name == "nvidia.com/gpu"
    assert found.want.whole_gpu
    assert names(node(Machine(H100)), Naming(whole_gpu="nvidia.com/gpu")) == names(node(Machine(H100)))


def test_prefixes_are_as_configured() -> None:
    naming = Naming(profiles="example.com/slice-", memory="example.com/mem-", amounts=("10g",))
    found = names(node(Machine(H100)), naming)
    assert "example.com/slice-1g.10gb" in found
    assert "example.com/mem-10g" in found
    assert all(each.startswith("example.com/") for each in found)


def test_leased_resource_stays_served_when_no_longer_offered() -> None:
    """A container restarts long after the settings have changed."""
    view = node(Machine(H100, [Has("1g.10gb", 0, "leased", "alice")]))
    (lease,) = view.leases.values()
    device = KubeletDevice(resource="mig-agent.io/memory-9g", id="mig-agent-0")
    view = replace(view, leases={lease.id: replace(lease, owner=bound(Pod(namespace="a", name="x"), (device,)))})
    found = {each.name: each for each in resources_of(view, Naming(amounts=()))}
    assert found["mig-agent.io/memory-9g"].want.profile == "1g.10gb"
    assert found["mig-agent.io/memory-9g"].label == "memory-9g"


def test_labels_depend_on_the_name_alone() -> None:
    assert label_of("nvidia.com/mig-1g.10gb") == "mig-1g.10gb"
    assert label_of("example.com/mig-1g.10gb") == "example.com_mig-1g.10gb"


@given(nodes(layouts=LAYOUTS))
def test_every_resource_name_is_valid_in_kubernetes(view: NodeView) -> None:
    found = resources_of(view, Naming())
    assert all(NAME.fullmatch(each.name) for each in found)
    assert len({each.label for each in found}) == len(found)


def test_graphics_profiles_have_names_too() -> None:
    assert any(each.endswith(".gfx") for each in names(node(Machine(RTX_PRO))))
