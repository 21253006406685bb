"""The Python client of mig-agent.

>>> from mig_agent.client import Client
>>> with Client().lease(gpu_memory="4G") as lease:      # doctest: +SKIP
...     print(lease.env, lease.devices[0].uuid)
"""

from __future__ import annotations

from mig_agent.client.answers import Device, Grant, Plan, Status
from mig_agent.client.channels import Tls
from mig_agent.client.client import Client
from mig_agent.client.errors import ClientError, NoAgent, Refused
from mig_agent.client.leases import Lease
from mig_agent.core.errors import UsageError

__all__ = [
    "Client",
    "ClientError",
    "Device",
    "Grant",
    "Lease",
    "NoAgent",
    "Plan",
    "Refused",
    "Status",
    "Tls",
    "UsageError",
]
