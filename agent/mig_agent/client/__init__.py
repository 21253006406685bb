"""The Python client of mig-agent.

>>> from mig_agent.client import Client
>>> with Client().lease(gpu_memory="4G") as lease:      # doctest: +SKIP
...     print(lease.env, lease.devices[0].uuid)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mig_agent.client.answers import Device, Grant, Plan, Pod, Status
from mig_agent.client.channels import Tls
from mig_agent.client.client import Client
from mig_agent.client.errors import ClientError, NoAgent, Refused
from mig_agent.client.leases import Lease
from mig_agent.core.errors import UsageError

if TYPE_CHECKING:
    from mig_agent.client.aio.client import AsyncClient
    from mig_agent.client.aio.leases import AsyncLease

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "Client",
    "ClientError",
    "Device",
    "Grant",
    "Lease",
    "NoAgent",
    "Plan",
    "Pod",
    "Refused",
    "Status",
    "Tls",
    "UsageError",
]


def __getattr__(name: str) -> object:
    """The asynchronous client, once somebody names it: `migctl` starts without it."""
    if name == "AsyncClient":
        from mig_agent.client.aio.client import AsyncClient  # noqa: PLC0415 -- see above

        return AsyncClient
    if name == "AsyncLease":
        from mig_agent.client.aio.leases import AsyncLease  # noqa: PLC0415 -- see above

        return AsyncLease
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
