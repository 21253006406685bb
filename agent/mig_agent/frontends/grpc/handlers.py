"""What every gRPC method has in common: a limit on concurrent calls, and refusals that become statuses.

The handlers are made here from the service's own descriptor, rather than by the generated servicer, so that a message
that cannot even be read is answered in words like any other mistake. Nothing escapes as a traceback.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from mig_agent.adapters.grpc_errors import LONGEST_WORDS, STATUS, TRAILER, shortened, trailer_of
from mig_agent.adapters.transport.peer_credentials import own_uid, peer_from
from mig_agent.core.errors import Reason, Refusal, RefusedError, UsageError, refuse
from mig_agent.core.texts import visible
from mig_agent.frontends.grpc.opening_streams import SPARE, OpeningStreams
from mig_agent.frontends.grpc.text_checks import check_texts
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

_ROOT: Final = 0
_ALWAYS_TAKEN: Final = frozenset({"Release", "Renew"})


class CallLimit:
    """CallLimit for so many calls of one kind. Belongs to the event loop."""

    def __init__(
        self, most: float, what: str, *, most_of_one: float = math.inf, unbounded: Collection[int] = ()
    ) -> None:
        """`what` names them in messages: "requests and watches"; `most_of_one` is how many one user may have.

        `unbounded` are users to whom only the total applies.
        """
        self._most = most
        self._most_of_one = most_of_one
        self._unbounded = frozenset(unbounded)
        self._what = what
        self._of_one: Counter[int | str | None] = Counter()
        self.taken = 0

    def left_to(self, who: int | str | None) -> float:
        """How many more calls this user might have if it were alone."""
        share = self._most if who in self._unbounded else min(self._most, self._most_of_one)
        return share - self._of_one[who]

    @contextmanager
    def place(self, who: int | str | None = None) -> Iterator[None]:
        """A place for one call as long as the block lasts. Raises RefusedError (QUEUE_FULL) where there is none."""
        if self.taken >= self._most:
            raise _refusal(f"{self.taken} {self._what}")
        if self.left_to(who) <= 0:
            raise _refusal(f"{self._of_one[who]} {self._what} of one user")
        self.taken += 1
        self._of_one[who] += 1
        try:
            yield
        finally:
            self.taken -= 1
            self._of_one[who] -= 1
            if not self._of_one[who]:
                del self._of_one[who]


def _refusal(what: str) -> RefusedError:
    return refuse(
        Reason.QUEUE_FULL,
        f"cannot take one more call: {what} are open on this socket, which is the limit",
        "try again later; the administrator sets the limit with max_calls",
    )


_SMALL_BYTES = 4096
_MOST_ANSWER_BYTES = 16 << 20
"""Five of the largest answers."""


class Answers:
    """Bounds the bytes of answers that one user has asked for and not taken: HTTP/2 lets a client refuse to take them.

    Belongs to the event loop.
    """

    def __init__(self, most_bytes: int = _MOST_ANSWER_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held: dict[int | str | None, int] = {}

    def hold(self, who: int | str | None, size: int) -> Callable[[], None] | None:
        """Counts an answer until what is returned is called; small ones are not counted.

        Raises RefusedError (QUEUE_FULL) where too many are not taken.
        """
        if size <= _SMALL_BYTES:
            return None
        held = self._held.get(who, 0)
        if held + size > self._most_bytes:
            raise refuse(
                Reason.QUEUE_FULL,
                f"cannot answer one more call: {held} bytes of answers to this user are not taken yet",
                "read the answers, or try again later",
            )
        self._held[who] = held + size

        def taken() -> None:
            left = self._held[who] - size
            if left:
                self._held[who] = left
            else:
                del self._held[who]

        return taken


class CallLimits:
    """The room of one socket, for so many calls of each kind."""

    def __init__(self, most: int) -> None:
        half = (most + 1) // 2
        # Root and the agent's own user could stop it anyway.
        self._streams = CallLimit(most, "requests and watches", most_of_one=half, unbounded=(_ROOT, own_uid()))
        self._others = CallLimit(most, "other calls", most_of_one=half)
        self._always = CallLimit(math.inf, "calls that end or renew a lease")

    def of(self, method: str, *, streams: bool) -> CallLimit:
        """The room of a method, which streams or does not."""
        if method in _ALWAYS_TAKEN:
            return self._always
        return self._streams if streams else self._others


def most_open(most: int) -> int:
    """How many calls one user may leave open where `CallLimits` takes so many of each kind."""
    return most + SPARE + (most + 1) // 2


Context = grpc.aio.ServicerContext[Any, Any]
"""The types of messages differ by method; each handler knows its own."""
Handler = Callable[[Any, Context], Awaitable[Message | None]]
"""A unary method returns its answer; a streaming one writes them to the context and returns None.

A method whose client streams, too, gets the first message, None for no message, and reads more with `next_message`.
"""

OnRefused = Callable[[str, object, Context, Refusal], None]
"""Hears of each refused call, with its method and message."""

_DEFINITION: Final = "proto/migagent/v1/partition_manager.proto"
SERVICE: Final = pb.DESCRIPTOR.services_by_name["PartitionManager"]

_MAKERS: Final[Mapping[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether the client streams, and whether the server does."""

_log = structlog.get_logger(__name__)


class Unreadable:
    """Stands for a request whose bytes are no message of its method, or whose texts cannot be taken."""

    def __init__(self, error: UsageError | None = None) -> None:
        self.error = error


def _nobody_listens(_method: str, _message: object, _context: Context, _refusal: Refusal) -> None:
    return


def method_handlers(
    servicer: object, most_calls: int, on_refused: OnRefused = _nobody_listens
) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
    """A handler for each method of the service, from the coroutine of the same name in snake_case.

    Together they take so many calls of each kind at once. Raises AttributeError when the servicer lacks one.
    """
    rooms, answers = CallLimits(most_calls), Answers()
    handlers = {}
    for method in SERVICE.methods:
        room = rooms.of(method.name, streams=method.server_streaming)
        answer = getattr(servicer, _snake_case(method.name))
        opening = OpeningStreams(partial(_most_streams, room)) if method.client_streaming else None
        call = _guarded(answer, method.name, room, answers, on_refused, opening=opening)
        make = _MAKERS[method.client_streaming, method.server_streaming]
        handlers[method.name] = make(
            call,
            request_deserializer=reader(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return handlers


async def next_message(context: Context, method: str) -> Any:  # noqa: ANN401 -- the method's own type of message
    """Read one message of a client that streams; None where it has ended its half of the stream.

    Raises RefusedError for bytes that are no message of the method.
    """
    message = await context.read()
    if isinstance(message, Unreadable):
        raise RefusedError(unreadable(method, _DEFINITION, message.error))
    return None if message is grpc.aio.EOF else message


async def abort(context: Context, refusal: Refusal) -> None:
    """Ends the call with the status of the refusal and its details."""
    await context.abort(
        STATUS[refusal.reason],
        shortened(visible(refusal.message), LONGEST_WORDS),
        trailing_metadata=((TRAILER, trailer_of(refusal)),),
    )


def _most_streams(room: CallLimit, who: int | str | None) -> float:
    """How many streams on which no request has come a user may have now."""
    return room.left_to(who) + SPARE


def _guarded(
    call: Handler,
    name: str,
    room: CallLimit,
    answers: Answers,
    on_refused: OnRefused,
    *,
    opening: OpeningStreams | None,
) -> Handler:
    """Answers refusals as statuses; with `opening` the client streams, too."""

    async def guarded(message: object, context: Context) -> Message | None:
        try:
            if opening is not None:
                async with opening.waiting(_who(context)):
                    message = await next_message(context, name)
            if not isinstance(message, Unreadable):
                with room.place(_who(context)):
                    answer = await call(message, context)
                if answer is not None:
                    _hold(answer, answers, context)
                return answer
            await abort(context, unreadable(name, _DEFINITION, message.error))
        except RefusedError as error:
            on_refused(name, message, context, error.refusal)
            await abort(context, error.refusal)
        except UsageError as error:
            await abort(context, Refusal(reason=Reason.INVALID_REQUEST, message=error.message, hint=error.hint))
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except grpc.aio.InternalError:  # the caller went away while it was written to
            raise asyncio.CancelledError from None
        except Exception:  # noqa: BLE001 -- the caller is told in words, the log gets the traceback
            _log.exception("a call of the API failed unexpectedly", method=name)
            await context.abort(
                grpc.StatusCode.INTERNAL,
                f"cannot complete {name}: the agent failed in a way that it did not expect; its log tells more",
            )
        raise AssertionError("abort returns never")

    return guarded


def _hold(answer: Message, answers: Answers, context: Context) -> None:
    """Counts an answer until the call has ended. Raises RefusedError where the caller does not take its answers."""
    taken = answers.hold(_who(context), answer.ByteSize())
    if taken is not None:
        context.add_done_callback(lambda _: taken())  # type: ignore[arg-type]  # a Protocol, by its parameter


def _who(context: Context) -> int | str | None:
    """Whose calls and answers share one bound: those of one user on Unix sockets, and of one connection over TCP."""
    peer = peer_from(context.peer())
    return context.peer() if peer is None else peer.uid


def unreadable(method: str, definition: str, error: UsageError | None = None) -> Refusal:
    """Refuses a message that cannot be read, or of which `error` says why it cannot be taken.

    `definition` is the file that defines it.
    """
    if error is not None:
        return Refusal(reason=Reason.INVALID_REQUEST, message=error.message, hint=error.hint)
    return Refusal(
        reason=Reason.INVALID_REQUEST,
        message=f"cannot read the message of {method}: it is not what the API defines",
        hint=f"make it from {definition}",
    )


def reader(message: type[Message]) -> Callable[[bytes], object]:
    """Makes a deserialiser that answers `Unreadable` for bytes that are no such message."""

    def read(serialised: bytes) -> object:
        try:
            request = message.FromString(serialised)
            check_texts(request)
        except DecodeError:
            return Unreadable()
        except UsageError as error:
            return Unreadable(error)
        return request

    return read


def _snake_case(name: str) -> str:
    return "".join("_" + each.lower() if each.isupper() else each for each in name).lstrip("_")
