"""The Python client of mig-agent.

>>> from mig_agent.client import Client
>>> with Client().lease(gpu_memory="4G") as lease:      # doctest: +SKIP
...     print(lease.env, lease.devices[0].uuid)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mig_agent.client.addresses import addresses_by_node
from mig_agent.client.channels import Tls
from mig_agent.client.client import Client
from mig_agent.client.errors import ClientError, NoAgent, Refused
from mig_agent.client.leases import Lease
from mig_agent.client.types import (
    Device,
    Event,
    Gpu,
    Grant,
    Instance,
    LeaseInfo,
    NoPlan,
    Plan,
    Pod,
    Status,
    Usage,
)
from mig_agent.core.errors import MigAgentError, UsageError
from mig_agent.core.pod_resources import devices_of, pod_resources

if TYPE_CHECKING:
    from mig_agent.client.aio.client import AsyncClient
    from mig_agent.client.aio.fleet import AsyncFleet, Reservation
    from mig_agent.client.aio.leases import AsyncLease

__all__ = [
    "AsyncClient",
    "AsyncFleet",
    "AsyncLease",
    "Client",
    "ClientError",
    "Device",
    "Event",
    "Gpu",
    "Grant",
    "Instance",
    "Lease",
    "LeaseInfo",
    "MigAgentError",
    "NoAgent",
    "NoPlan",
    "Plan",
    "Pod",
    "Refused",
    "Reservation",
    "Status",
    "Tls",
    "Usage",
    "UsageError",
    "addresses_by_node",
    "devices_of",
    "pod_resources",
]
_ASYNCHRONOUS = {
    "AsyncClient": "mig_agent.client.aio.client",
    "AsyncFleet": "mig_agent.client.aio.fleet",
    "AsyncLease": "mig_agent.client.aio.leases",
    "Reservation": "mig_agent.client.aio.fleet",
}


def __getattr__(name: str) -> object:
    """Import the asynchronous client when it is first used: `migctl` starts without it."""
    if name in _ASYNCHRONOUS:
        return getattr(import_module(_ASYNCHRONOUS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
