"""Finds leases and waiting requests as people name them: by id, its beginning, or the name of the request."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mig_agent.core.errors import UsageError
from mig_agent.core.holder_names import LABELLED, user_of
from mig_agent.core.quantities import counted, shown
from mig_agent.migctl.printing import place

if TYPE_CHECKING:
    from mig_agent.client import Client, Refused
    from mig_agent.client.tokens import RememberedTokens
    from mig_agent.client.types import LeaseInfo, Status, Waiting

LONGEST_NAME = 128
_WHOLE_ID = re.compile(r"[0-9a-f]{16}")
_MOST_CANDIDATES = 8
_SHORT_ID = 8
_LONGER_ID = "write the beginning of its id instead, up to where it differs from the others"
_WHOLE_UP_TO = 12
"""Ids up to this length are not shortened: people chose them."""


def check_name(text: str, what: str = "a lease") -> None:
    """Raise UsageError for what cannot be the id or the name of a lease, or of `what` else."""
    if not text.strip() or len(text) > LONGEST_NAME or not text.isprintable():
        option = "--leases" if what == "a lease" else "--mine"
        raise UsageError(
            f"cannot take {shown(text) or 'an empty text'} as {what}", f"`migctl status {option}` shows their ids"
        )


def names_of(lease: LeaseInfo) -> tuple[str, ...]:
    """Return the names, beside its id, by which a lease can be called: `alice (train)`, `train`, `alice`; its pod's."""
    return (*_names_in(lease.holder), *_pod_names(lease))


def request_names(request: Waiting) -> tuple[str, ...]:
    """Return the names, beside its id, by which a waiting request can be called: `alice (train)`, `train`, `alice`."""
    return _names_in(request.holder)


def lease_is_of(lease: LeaseInfo, user: str) -> bool:
    """Return True if a lease is of this user, by name or uid, of this tenant or of this pod."""
    return user in {lease.holder, user_of(lease.holder), lease.tenant, str(lease.holder_uid), *_pod_names(lease)}


def request_is_of(request: Waiting, user: str) -> bool:
    """Return True if a waiting request is of this user, by name or uid, of this tenant or of this caller."""
    return user in {
        request.holder,
        user_of(request.holder),
        request.tenant,
        str(request.holder_uid),
        request.caller or request.holder,
    }


def _names_in(holder: str) -> tuple[str, ...]:
    match = LABELLED.fullmatch(holder)
    return tuple(each for each in (holder, *((match["label"], match["user"]) if match else ())) if each)


def _pod_names(lease: LeaseInfo) -> tuple[str, ...]:
    pod = lease.pod
    return (pod.name, f"{pod.namespace}/{pod.name}") if pod is not None and pod.name else ()


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Return for each id its shortest beginning that no other has, of at least 8 characters; unknown ids have none."""
    known = sorted({each for each in ids if each})
    shortened = {}
    for before, each, after in zip(["", *known], known, [*known[1:], ""], strict=False):
        least = max(_SHORT_ID, 1 + _in_common(before, each), 1 + _in_common(each, after))
        shortened[each] = each if len(each) <= _WHOLE_UP_TO else each[:least]
    return shortened


def _in_common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginnings."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


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
        raise _ambiguous(text, "lease", [describe(each) for each in found])
    if not found:
        from mig_agent.client import Refused  # noqa: PLC0415 -- whoever has a client has imported it

        raise Refused(
            reason="unknown-lease",
            message=f"cannot find lease {shown(text)}: no lease of {node.node} is called so",
            hint="`migctl status --leases` lists them; `migctl events --lease NAME` is about one that has ended",
        )
    return found[0].id


def find_any_lease(client: Client, text: str) -> str:
    """Return the id of the active lease that is meant, else the text itself, by which the agent looks for ended ones.

    Raises UsageError if several active leases are meant.
    """
    from mig_agent.client import Refused  # noqa: PLC0415 -- whoever has a client has imported it

    try:
        return find_lease(client, text)
    except Refused as error:
        if error.reason != "unknown-lease":
            raise
        return text


def find_remembered(client: Client, remembered: RememberedTokens, text: str) -> str:
    """Return the id of the lease that is meant, of those whose tokens are remembered: its agent may know it no more.

    A whole id is returned as it is, and so is that of an active lease where none is remembered. Raises UsageError if
    several are meant, and Refused (`unknown-lease`) if none is called so.
    """
    if _WHOLE_ID.fullmatch(text):
        return text
    named = remembered.names(str(client.address))
    found = [lease for lease, name in named.items() if lease.startswith(text) or name == text]
    if len(found) > 1:
        raise _ambiguous(text, "lease", [f"{each} ({named[each] or 'no name'})" for each in found])
    found = found[:1] or [find_any_lease(client, text)]
    if found == [text]:
        from mig_agent.client import Refused  # noqa: PLC0415 -- whoever has a client has imported it

        raise Refused(
            reason="unknown-lease",
            message=f"cannot recover lease {shown(text)}: migctl remembers none that is called so, and none is active",
            hint="with its whole id and its token nothing needs to be remembered: `migctl recover ID --token TOKEN`",
        )
    return found[0]


def find_request(client: Client, text: str, node: Status, user: str | None = None) -> Waiting:
    """Return the waiting request that is meant, of those whose ids the agent tells: one's own, or all.

    `user`: only a request of this user, tenant or caller. One's own go before those of others, then a whole id before
    its beginning or a name. Raises UsageError if several requests are meant, and Refused (`unknown-request`) if none is
    called so.
    """
    known = [each for each in node.queue if each.request_id and (user is None or request_is_of(each, user))]
    found = [each for each in known if each.request_id.startswith(text) or text in request_names(each)]
    if len(found) > 1:
        own = own_requests(client, node)
        found = [each for each in found if each in own] or found
        found = [each for each in found if each.request_id == text] or found
    if len(found) > 1:
        raise _ambiguous_requests(text, found, node)
    if not found:
        raise _no_such_request(text, node, user)
    return found[0]


def _ambiguous_requests(text: str, found: Sequence[Waiting], node: Status) -> UsageError:
    ids = short_ids([each.request_id for each in node.queue])
    described = [_describe_request(each, ids[each.request_id]) for each in found]
    if len({each.request_id for each in found}) == len(found):
        return _ambiguous(text, "waiting request", described)
    # Two callers may use the same id.
    described = [
        f"{words} ({each.caller})" if each.caller else words for each, words in zip(found, described, strict=True)
    ]
    return _ambiguous(text, "waiting request", described, f"say whose it is: `migctl cancel {shown(text)} --user NAME`")


def _no_such_request(text: str, node: Status, user: str | None) -> Refused:
    from mig_agent.client import Refused  # noqa: PLC0415 -- whoever has a client has imported it

    whose = "" if user is None else f" of {shown(user)}"
    words, hint = f"no request{whose} of that id or name waits on {node.node}", "`migctl status` lists those that wait"
    others = [each for each in node.queue if not each.request_id and text in request_names(each)]
    leased = [each for each in node.leases if each.id == text or text in names_of(each)]
    if others:
        holder = others[0].holder
        words, hint = f"it is a request of {holder}", f"ask {others[0].tenant or user_of(holder)} or an administrator"
    elif leased:
        words, hint = f"it does not wait, it is lease {describe(leased[0])}", f"`migctl release {leased[0].id}` ends it"
    return Refused(reason="unknown-request", message=f"cannot cancel {shown(text)}: {words}", hint=hint)


def describe(lease: LeaseInfo) -> str:
    """Return a lease in one line: `556af997a1b4a287 of alice (train): 1g.10gb on GPU 2, slice 4`."""
    devices = ", ".join(
        f"{each.label} on {place(each.gpu_index, each.placement)}" if each.profile else "a lost device"
        for each in lease.devices
    )
    return f"{lease.id} of {lease.holder or lease.tenant or 'somebody'}: {devices}"


def _describe_request(request: Waiting, short_id: str) -> str:
    """Return a waiting request in one line: `3f2a91c0 of alice (train): 4G, place 2`."""
    return f"{short_id} of {request.holder or 'somebody'}: {request.wants}, place {request.position}"


def _ambiguous(text: str, noun: str, found: Sequence[str], hint: str = _LONGER_ID) -> UsageError:
    listed = "; ".join(found[:_MOST_CANDIDATES])
    more = f"; and {len(found) - _MOST_CANDIDATES} more" if len(found) > _MOST_CANDIDATES else ""
    return UsageError(
        f"cannot tell which {noun} {shown(text)} is: {counted(len(found), noun)} match: {listed}{more}", hint
    )
