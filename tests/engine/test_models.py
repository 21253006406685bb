"""GPU models that the catalog knows otherwise than the driver, or not at all: the driver wins, and it is told once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.adapters import catalog_files
from mig_agent.core.catalog import Catalog
from mig_agent.core.events import EventKind
from support.engine import ADMIN, Node, engine


@pytest.fixture(scope="module")
def mistaken() -> Catalog:
    """A catalog that thinks every smallest profile a mebibyte larger, and lacks the largest."""
    entries = []
    for entry in catalog_files.load().entries:
        first, *rest = entry.layout.profiles
        changed = (replace(first, memory_mib=first.memory_mib + 1), *rest[:-1])
        entries.append(replace(entry, layout=replace(entry.layout, profiles=changed)))
    return Catalog(entries=tuple(entries))


async def differences(node: Node) -> list[str]:
    await node.quiet()
    told = await node.manager.history.events(0.0, None, 1000)
    return [event.message for event in told if event.kind is EventKind.PROFILE_DIFFERS]


async def test_differences_are_reported_once_per_model(tmp_path: Path, mistaken: Catalog) -> None:
    async with engine(tmp_path, "a100-40gb:3", catalog=mistaken) as node:
        told = await differences(node)
        assert len(told) == 2
        assert told[0].startswith("NVIDIA A100-SXM4-40GB: the driver reports profile 1g.5gb ")
        assert "4865 in the catalog" in told[0]
        assert "profile 7g.40gb (id 0), which the catalog lacks" in told[1]
        await node.look()
        await node.acquire("7g.40gb")
        assert await differences(node) == told


async def test_the_driver_wins(tmp_path: Path, mistaken: Catalog) -> None:
    async with engine(tmp_path, "a100-40gb", catalog=mistaken) as node:
        granted = await node.acquire("1g.5gb")
        assert granted.devices[0].memory_mib == 4864
        await node.release(granted)
        assert (await node.acquire("7g.40gb")).devices[0].profile == "7g.40gb"


async def test_differences_that_show_only_in_mig_mode_are_reported_then(tmp_path: Path, mistaken: Catalog) -> None:
    async with engine(tmp_path, "h100-80gb", catalog=mistaken, mig_mode=False) as node:
        await node.manager.set_mig_mode("0", True, ADMIN)
        told = await differences(node)
        assert len(told) == len(set(told)) == 2
        await node.manager.set_mig_mode("0", False, ADMIN)
        await node.manager.set_mig_mode("0", True, ADMIN)
        assert await differences(node) == told


@pytest.mark.parametrize("gpu", ["a30", "a100-40gb", "h100-80gb", "rtx-pro-6000"])
async def test_a_model_with_no_file_works_from_the_driver_alone(tmp_path: Path, gpu: str) -> None:
    async with engine(tmp_path, gpu, catalog=Catalog()) as node:
        assert await differences(node) == []
        granted = await node.acquire("4G")
        smallest = min(each.memory_mib for each in node.gpu().layout.profiles)
        assert granted.devices[0].memory_mib == smallest
        await node.release(granted)
        again = await node.acquire("4G")
        assert again.devices[0].reused


async def test_agreement_is_not_reported(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1,h100-80gb:1") as node:
        assert await differences(node) == []
