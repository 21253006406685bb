"""What every gRPC method has in common: limits on calls, checks of their texts, and refusals that become statuses.

The handlers are made here from the service's own descriptor, rather than by the generated servicer, so that a message
that cannot even be read is answered in words like any other mistake. Nothing escapes as a traceback.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cache, partial
from typing import Any, Final

import grpc
import structlog
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from mig_agent.adapters.grpc_errors import LONGEST_WORDS, STATUS, TRAILER, shortened, trailer_of
from mig_agent.adapters.transport.peer_credentials import own_uid, peer_from
from mig_agent.core.errors import Reason, Refusal, RefusedError, UsageError, refuse
from mig_agent.core.texts import check_text, visible
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

_ROOT: Final = 0
FIRST_MESSAGE_SECONDS = 60.0
"""How long a client may leave a stream open before it sends its request; in a burst it may be behind many others."""
SPARE: Final = 1000
"""Streams of one user that may wait for their requests when those of its requests take all that they may."""
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


User = int | str | None


class OpeningStreams:
    """Bounds the streams of one user on which no request has come yet. Belongs to the event loop.

    In a burst a request may be behind the beginnings of thousands of other streams, which are not read while as many
    calls are open as may be: somebody has to be refused unheard then, or all would wait for each other.
    """

    def __init__(self, most: Callable[[User], float]) -> None:
        """`most` tells how many streams a user may open now, which is at least one."""
        self._most = most
        self._waiting: dict[User, dict[asyncio.Timeout, None]] = {}
        """Each with the time that it has, the oldest first."""

    def __len__(self) -> int:
        """Count the streams that wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def waiting(self, who: User) -> AsyncIterator[None]:
        """Wait in the block for the request of a stream.

        Raises UsageError when none has come in time, RefusedError (QUEUE_FULL) where the user has opened too many more.
        """
        self._make_place(who)
        limit = asyncio.timeout(FIRST_MESSAGE_SECONDS)
        try:
            async with limit:
                self._waiting.setdefault(who, {})[limit] = None
                yield
        except TimeoutError:
            if limit not in self._waiting.get(who, {}):
                raise refuse(
                    Reason.QUEUE_FULL,
                    "cannot wait longer for a request: this user has opened too many other streams without one",
                    "try again later; the administrator sets the limit with max_calls",
                ) from None
            raise UsageError(
                f"cannot wait longer for a request: none came in {FIRST_MESSAGE_SECONDS:g} s",
                "send `request` as the first message of the stream",
            ) from None
        finally:
            self._forget(who, limit)

    def _make_place(self, who: User) -> None:
        """End the wait of the oldest where the user has as many as may be."""
        of_one = self._waiting.get(who, {})
        if len(of_one) >= self._most(who):
            oldest = next(iter(of_one), None)
            if oldest is not None:
                self._forget(who, oldest)
                if not oldest.expired():
                    oldest.reschedule(asyncio.get_running_loop().time())

    def _forget(self, who: User, limit: asyncio.Timeout) -> None:
        of_one = self._waiting.get(who, {})
        of_one.pop(limit, None)
        if not of_one:
            self._waiting.pop(who, None)


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


def check_texts(message: Message) -> None:
    """Raise UsageError for a text with control, bidirectional or invisible characters anywhere in a message.

    Texts in fields that this version does not know are not looked at, and go nowhere.
    """
    for name in _fields_with_texts(message.DESCRIPTOR):
        value = getattr(message, name)
        if isinstance(value, str):
            check_text(value, f"`{name}`", repeat=False)
        elif isinstance(value, Message):
            if message.HasField(name):
                check_texts(value)
        else:
            for each in value:
                if isinstance(each, str):
                    check_text(each, f"`{name}`", repeat=False)
                else:
                    check_texts(each)


def texts_within(message: Descriptor) -> Iterator[str]:
    """The paths of all texts in a message, such as `request.holder.name`; a test goes through them."""
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield field.name
        elif field.message_type is not None:
            yield from (f"{field.name}.{each}" for each in texts_within(field.message_type))


@cache
def _fields_with_texts(message: Descriptor) -> tuple[str, ...]:
    """The names of the fields in which a text can be, at whatever depth; found once for each type of message.

    Raises AssertionError for a map, which no request has yet: its values would have to be checked in another way.
    """
    for field in message.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            raise AssertionError(f"cannot check the texts in {field.full_name}: it is a map")
    return tuple(dict.fromkeys(path.partition(".")[0] for path in texts_within(message)))
