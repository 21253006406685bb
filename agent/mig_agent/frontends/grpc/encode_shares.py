"""Encodes shares of GPUs: what enforces their limits, what that is worth, and the account of a GPU's memory."""

from __future__ import annotations

from mig_agent.core.model import Gpu
from mig_agent.core.planning.shares import shared_mib, shares_of
from mig_agent.core.shares import Enforcement, ShareTerms
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb


def account_of_shares(each: Gpu) -> pb.SharedMemory | None:
    """Encode the account of a GPU that can be shared, or still is, after it was forbidden; None for others."""
    terms = each.layout.shares
    if terms is None:
        return _account_of_the_last(each)
    return shared_memory(terms, shared_mib(each) - terms.others_mib, terms.others_mib)


def _account_of_the_last(each: Gpu) -> pb.SharedMemory | None:
    """Encode the account of shares that were leased before the GPU was forbidden to have more; None without any."""
    shares = shares_of(each.instances)
    if not shares:
        return None
    return pb.SharedMemory(
        enforced_by=enforcement(shares[0].enforced_by),
        usable_mib=each.layout.memory_mib,
        taken_mib=sum(one.slot.profile.memory_mib for one in shares),
        promise=promise(shares[0].enforced_by),
    )


def shared_memory(terms: ShareTerms, taken_mib: int = 0, others_mib: int = 0) -> pb.SharedMemory:
    """Encode the terms on which a GPU is shared, with what is taken of its memory."""
    return pb.SharedMemory(
        enforced_by=terms.enforced_by.value,
        usable_mib=terms.usable_mib,
        taken_mib=taken_mib,
        overhead_mib=terms.overhead_mib,
        least_mib=terms.least_mib,
        promise=terms.enforced_by.promise,
        others_mib=others_mib,
        without_process=enforcement(terms.way(has_process=False)),
    )


def enforcement(each: Enforcement | None) -> str:
    """Return how the limit of a share is enforced as the word of the API; empty for other kinds of devices."""
    return "" if each is None else each.value


def promise(each: Enforcement | None) -> str:
    """Return what a share isolates and what not; empty for other kinds of devices."""
    return "" if each is None else each.promise
