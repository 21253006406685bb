"""Cancellation of waiting requests by their callers and by administrators."""

from __future__ import annotations

from mig_agent.core.errors import Reason, Refusal, refuse
from mig_agent.core.quantities import shown
from mig_agent.core.requests import phrase_of
from mig_agent.engine.callers import Caller
from mig_agent.engine.queueing import RequestQueue
from mig_agent.engine.results import QueueEntry

_MOST_NAMED = 8
"""Number of requests that a message names where an id fits several."""


class Cancellation:
    """Takes waiting requests out of the queue. Not thread-safe; use from the event loop.

    The queue is not recorded: a client that lost its connection before it was told asks again, and waits again.
    """

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue

    def cancel(
        self, request_id: str, reason: str, caller: Caller, *, mine: bool, of: str = ""
    ) -> tuple[QueueEntry, ...]:
        """Cancel a waiting request by its id or a unique beginning of it, or with `mine` all of the caller's own.

        `of`: only a request of this caller id, since two callers may use the same request id. Return the requests as
        they waited. Administrators may cancel any. Raises RefusedError (UNKNOWN_REQUEST).
        """
        waiting = [each for each in self._queue.queued if caller.admin or each.request.caller_id == caller.caller_id]
        waiting = [each for each in waiting if of in {"", each.request.caller_id}]
        if mine:
            chosen = [each for each in waiting if each.request.caller_id == caller.caller_id]
        else:
            chosen = [self._one(request_id, waiting, of_any=caller.admin)]
        by = f"{caller} (an administrator)" if caller.admin and caller.name else str(caller)
        why = f": {reason}" if reason else ""
        for each in chosen:
            refusal = Refusal(
                reason=Reason.CANCEL_REQUESTED,
                message=f"cannot wait on for {phrase_of(each.wants)}: the request was cancelled by {by}{why}",
                hint="ask again if you still need it",
            )
            self._queue.dequeue(each.request, refusal)
        return tuple(chosen)

    @staticmethod
    def _one(request_id: str, waiting: list[QueueEntry], *, of_any: bool) -> QueueEntry:
        exact = [each for each in waiting if each.request_id == request_id]
        found = exact or [each for each in waiting if request_id and each.request_id.startswith(request_id)]
        if len(found) == 1:
            return found[0]
        text = shown(request_id)
        if found:
            names = ", ".join(
                f"{shown(each.request_id)} of {each.who} ({each.request.caller_id})" for each in found[:_MOST_NAMED]
            )
            more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            raise refuse(
                Reason.UNKNOWN_REQUEST,
                f"cannot cancel {text}: {len(found)} waiting requests match: {names}{more}",
                f"say whose it is: `migctl cancel {text} --user NAME`" if exact else "write more of the id",
            )
        raise refuse(
            Reason.UNKNOWN_REQUEST,
            f"cannot cancel {text or 'a request without its id'}: no request {'' if of_any else 'of yours '}with this "
            "id waits",
            "`migctl status` shows the waiting requests; `migctl release` ends a lease",
        )
