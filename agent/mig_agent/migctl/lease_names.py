"""Finds leases as people name them: by id, the beginning of an id, or the name that they were requested under."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mig_agent.core.errors import UsageError
from mig_agent.core.holder_names import LABELLED
from mig_agent.core.quantities import counted, shown
from mig_agent.migctl.printing import place

if TYPE_CHECKING:
    from mig_agent.client import Client
    from mig_agent.client.types import LeaseInfo, Status, Waiting

LONGEST_NAME = 128
_WHOLE_ID = re.compile(r"[0-9a-f]{16}")
_MOST_CANDIDATES = 8


def check_name(text: str) -> None:
    """Raise UsageError for what cannot be the id or the name of a lease."""
    if not text.strip() or len(text) > LONGEST_NAME or not text.isprintable():
        raise UsageError(
            f"cannot take {shown(text) or 'an empty text'} as a lease",
            "`migctl status --leases` shows the ids of leases",
        )


def names_of(lease: LeaseInfo) -> tuple[str, ...]:
    """Return the names, beside its id, by which a lease can be called: `alice (train)`, `train`; of a pod its own."""
    match = LABELLED.fullmatch(lease.holder)
    names = [lease.holder, *([match["label"]] if match else [])]
    if lease.pod is not None and lease.pod.name:
        names += [lease.pod.name, f"{lease.pod.namespace}/{lease.pod.name}"]
    return tuple(each for each in names if each)


def own_leases(client: Client, node: Status) -> tuple[LeaseInfo, ...]:
    """Return this person's leases: requested under the same uid on this machine, or with a token that is remembered."""
    from mig_agent.client.tokens import RememberedTokens  # noqa: PLC0415 -- only where it is needed

    remembered = frozenset(RememberedTokens.of_this_person().leases(str(client.address)))
    uid = os.getuid() if client.address.path is not None else None
    return tuple(each for each in node.leases if each.id in remembered or (uid is not None and each.holder_uid == uid))


def own_requests(client: Client, node: Status) -> tuple[Waiting, ...]:
    """Return this person's waiting requests: made under the same uid on this machine.

    Over TCP those whose ids the agent tells: to an administrator all.
    """
    if client.address.path is None:
        return tuple(each for each in node.queue if each.request_id)
    return tuple(each for each in node.queue if each.holder_uid == os.getuid())


def find_lease(client: Client, text: str, node: Status | None = None) -> str:
    """Return the id of the lease that is meant. A whole id is returned as it is: the lease may have ended.

    `node`: its state, where it is known already. Raises UsageError if several leases are meant, and Refused
    (`unknown-lease`) if none is called so.
    """
    if _WHOLE_ID.fullmatch(text):
        return text
    node = client.status() if node is None else node
    found = [each for each in node.leases if each.id.startswith(text) or text in names_of(each)]
    if len(found) > 1:
        own = {each.id for each in own_leases(client, node)}
        found = [each for each in found if each.id in own] or found
    if len(found) > 1:
        raise _ambiguous(text, found)
    if not found:
        from mig_agent.client import Refused  # noqa: PLC0415 -- whoever has a client has imported it

        raise Refused(
            reason="unknown-lease",
            message=f"cannot find lease {shown(text)}: no lease of {node.node} is called so",
            hint="`migctl status --leases` lists them; one that has ended is named by its whole id",
        )
    return found[0].id


def describe(lease: LeaseInfo) -> str:
    """Return a lease in one line: `556af997a1b4a287 of alice (train): 1g.10gb on GPU 2, slice 4`."""
    devices = ", ".join(
        f"{each.profile} on {place(each.gpu_index, each.placement)}" if each.profile else "a lost device"
        for each in lease.devices
    )
    return f"{lease.id} of {lease.holder or lease.tenant or 'somebody'}: {devices}"


def _ambiguous(text: str, found: Sequence[LeaseInfo]) -> UsageError:
    listed = "; ".join(describe(each) for each in found[:_MOST_CANDIDATES])
    more = f"; and {len(found) - _MOST_CANDIDATES} more" if len(found) > _MOST_CANDIDATES else ""
    return UsageError(
        f"cannot tell which lease {shown(text)} is: {counted(len(found), 'lease')} match: {listed}{more}",
        "write more of its id",
    )
