"""The GPU models that can be simulated, built from the recorded rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from mig_agent.simulator import recorded


@dataclass(frozen=True, slots=True)
class Window:
    """A placement: start and size, in memory slices (of a GPU instance) or compute slices (of a compute instance)."""

    start: int
    size: int

    @property
    def mask(self) -> int:
        """The window as a bit mask, bit n for slice n."""
        return ((1 << self.size) - 1) << self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProfile:
    """A row of `nvidia-smi mig -lcip`. The enum is also the id."""

    id: int
    slices: int
    instance_count: int
    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """A row of `nvidia-smi mig -lgip`."""

    name: str
    enum: int
    id: int
    slices: int
    instance_count: int
    """What NVML reports, which is wrong on some models."""
    multiprocessors: int
    memory_mib: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg: int
    ofa: int
    windows: tuple[Window, ...]

    @property
    def engines(self) -> tuple[int, ...]:
        """The engines that an instance takes; the sums over all instances stay within the GPU's totals."""
        return (self.multiprocessors, self.copy_engines, self.decoders, self.encoders, self.jpeg, self.ofa)

    @property
    def is_plain(self) -> bool:
        """True if the name has no attribute."""
        return "+" not in self.name and "-" not in self.name

    @property
    def compute_profiles(self) -> tuple[ComputeProfile, ...]:
        """The compute-instance profiles inside such an instance."""
        return _COMPUTE[self.slices]


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """A GPU model: what the driver reports of it at any time."""

    key: str
    """Its name in `--simulate`."""
    name: str
    pci_device_id: int
    memory_mib: int
    compute_capability: tuple[int, int]
    slices: int
    """Compute slices, which is also how many MIG devices fit; 0 without MIG."""
    memory_slices: int
    profiles: tuple[GpuProfile, ...]

    @property
    def can_mig(self) -> bool:
        """True if the GPU has a MIG mode."""
        return bool(self.profiles)

    @property
    def mode_needs_reset(self) -> bool:
        """True for Ampere, which takes a new MIG mode at a reset and keeps it over a reboot.

        Later GPUs take it at once and lose it at a reboot.
        """
        return self.compute_capability[0] == 8  # noqa: PLR2004 -- CUDA's number of the Ampere generation

    @property
    def has_gpm(self) -> bool:
        """True for Hopper and later, which count what their multiprocessors do for NVML (GPM)."""
        return self.compute_capability[0] >= 9  # noqa: PLR2004 -- CUDA's number of the Hopper generation

    @cached_property
    def by_id(self) -> MappingProxyType[int, GpuProfile]:
        """Profiles by the driver's id."""
        return MappingProxyType({profile.id: profile for profile in self.profiles})

    @cached_property
    def by_enum(self) -> MappingProxyType[int, GpuProfile]:
        """Profiles by NVML's enum."""
        return MappingProxyType({profile.enum: profile for profile in self.profiles})

    @cached_property
    def engine_totals(self) -> tuple[int, ...]:
        """The GPU's engines: the counts of its full-size plain profile."""
        full = max((p for p in self.profiles if p.is_plain), key=lambda p: p.windows[0].size)
        return full.engines


def _gpu_profiles(rows: str) -> tuple[GpuProfile, ...]:
    profiles = []
    for row in rows.strip().splitlines():
        name, *numbers, starts = row.split()
        enum, id_, slices, count, sms, memory, copy, dec, enc, jpeg, ofa, size = map(int, numbers)
        profiles.append(
            GpuProfile(
                name=name,
                enum=enum,
                id=id_,
                slices=slices,
                instance_count=count,
                multiprocessors=sms,
                memory_mib=memory,
                copy_engines=copy,
                decoders=dec,
                encoders=enc,
                jpeg=jpeg,
                ofa=ofa,
                windows=tuple(Window(int(start), size) for start in starts.split(",")),
            )
        )
    return tuple(profiles)


def _compute_profiles(rows: str) -> tuple[ComputeProfile, ...]:
    profiles = []
    for row in rows.strip().splitlines():
        id_, slices, count, starts = row.split()
        windows = tuple(Window(int(start), int(slices)) for start in starts.split(","))
        profiles.append(ComputeProfile(id=int(id_), slices=int(slices), instance_count=int(count), windows=windows))
    return tuple(profiles)


_COMPUTE = MappingProxyType({slices: _compute_profiles(rows) for slices, rows in recorded.COMPUTE.items()})


def _model(
    key: str,
    name: str,
    *,
    pci: int,
    memory: int,
    capability: tuple[int, int],
    rows: str = "",
    slices: int = 7,
    memory_slices: int = 8,
) -> GpuModel:
    return GpuModel(
        key=key,
        name=name,
        pci_device_id=pci,
        memory_mib=memory,
        compute_capability=capability,
        slices=slices if rows else 0,
        memory_slices=memory_slices if rows else 0,
        profiles=_gpu_profiles(rows),
    )


_HOPPER = (9, 0)

MODELS = MappingProxyType(
    {
        model.key: model
        for model in (
            _model(
                "a30",
                "NVIDIA A30",
                pci=0x20B710DE,
                memory=24576,
                capability=(8, 0),
                rows=recorded.A30,
                slices=4,
                memory_slices=4,
            ),
            _model(
                "a100-40gb",
                "NVIDIA A100-SXM4-40GB",
                pci=0x20B010DE,
                memory=40960,
                capability=(8, 0),
                rows=recorded.A100_40GB,
            ),
            _model(
                "a100-80gb",
                "NVIDIA A100-SXM4-80GB",
                pci=0x20B210DE,
                memory=81920,
                capability=(8, 0),
                rows=recorded.A100_80GB,
            ),
            _model(
                "h100-80gb",
                "NVIDIA H100 80GB HBM3",
                pci=0x233010DE,
                memory=81559,
                capability=_HOPPER,
                rows=recorded.H100_80GB,
            ),
            _model(
                "h100-94gb",
                "NVIDIA H100 NVL",
                pci=0x232110DE,
                memory=95830,
                capability=_HOPPER,
                rows=recorded.H100_94GB,
            ),
            # The product name and the PCI id were not captured.
            _model(
                "h100-96gb",
                "NVIDIA H100 96GB HBM3",
                pci=0x233D10DE,
                memory=97871,
                capability=_HOPPER,
                rows=recorded.GH200_96GB,
            ),
            # The name carries the size of the CPU's memory.
            _model(
                "gh200-96gb",
                "NVIDIA GH200 480GB",
                pci=0x234210DE,
                memory=97871,
                capability=_HOPPER,
                rows=recorded.GH200_96GB,
            ),
            _model(
                "gh200-144gb",
                "NVIDIA GH200 144G HBM3e",
                pci=0x234810DE,
                memory=146831,
                capability=_HOPPER,
                rows=recorded.GH200_144GB,
            ),
            _model(
                "h200-141gb", "NVIDIA H200", pci=0x233510DE, memory=143771, capability=_HOPPER, rows=recorded.H200_141GB
            ),
            _model(
                "b200-180gb", "NVIDIA B200", pci=0x290110DE, memory=183359, capability=(10, 0), rows=recorded.B200_180GB
            ),
            _model(
                "rtx-pro-6000",
                "NVIDIA RTX PRO 6000 Blackwell Server Edition",
                pci=0x2BB510DE,
                memory=97887,
                capability=(12, 0),
                rows=recorded.RTX_PRO_6000,
                slices=4,
                memory_slices=12,
            ),
            # Below are GPUs without MIG.
            _model("t4", "Tesla T4", pci=0x1EB810DE, memory=15360, capability=(7, 5)),
            _model("v100", "Tesla V100-SXM2-16GB", pci=0x1DB110DE, memory=16384, capability=(7, 0)),
            _model("a10", "NVIDIA A10", pci=0x223610DE, memory=23028, capability=(8, 6)),
            _model("l4", "NVIDIA L4", pci=0x27B810DE, memory=23034, capability=(8, 9)),
            _model("l40s", "NVIDIA L40S", pci=0x26B910DE, memory=46068, capability=(8, 9)),
        )
    }
)
"""Every model by its key."""
