"""Code common to all gRPC methods: limits on calls, checks of their texts, and refusals that become statuses.

The handlers are made from the service's descriptor, not by the generated servicer. So a message that cannot be parsed
gets a message and a hint like any other invalid request, and no exception reaches the client as a traceback.
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
EXTRA_STREAMS: Final = 1000
"""How many streams of a user may wait for their first message even when the user's call limit is used up."""
_ALWAYS_TAKEN: Final = frozenset({"Release", "Renew"})


class CallLimit:
    """Limits the concurrent calls of one kind, in total and per user. Not thread-safe; use from the event loop."""

    def __init__(
        self, most: float, what: str, *, most_per_user: float = math.inf, unbounded: Collection[int] = ()
    ) -> None:
        """Allow `most` calls in total and `most_per_user` for each user.

        `what` names the calls in messages: "requests and watches". `unbounded` are uids to which only the total
        applies.
        """
        self._most = most
        self._most_per_user = most_per_user
        self._unbounded = frozenset(unbounded)
        self._what = what
        self._by_user: Counter[User] = Counter()
        self._in_use = 0

    def remaining(self, user: User) -> float:
        """Return how many more calls this user could make if there were no other users."""
        share = self._most if user in self._unbounded else min(self._most, self._most_per_user)
        return share - self._by_user[user]

    @contextmanager
    def slot(self, user: User = None) -> Iterator[None]:
        """Occupy the slot of one call while the block runs. Raises RefusedError (QUEUE_FULL) if no slot is free."""
        if self._in_use >= self._most:
            raise _refusal(f"{self._in_use} {self._what}")
        if self.remaining(user) <= 0:
            raise _refusal(f"{self._by_user[user]} {self._what} of one user")
        self._in_use += 1
        self._by_user[user] += 1
        try:
            yield
        finally:
            self._in_use -= 1
            self._by_user[user] -= 1
            if not self._by_user[user]:
                del self._by_user[user]


def _refusal(what: str) -> RefusedError:
    return refuse(
        Reason.QUEUE_FULL,
        f"cannot take one more call: {what} are open on this socket, which is the limit",
        "try again later; the administrator sets the limit with max_calls",
    )


_SMALL_BYTES = 4096
_MOST_ANSWER_BYTES = 16 << 20
"""As much as five of the largest answers have."""


class UnreadAnswers:
    """Bounds the bytes of answers that one user has requested and not read: HTTP/2 lets a client stop reading.

    Not thread-safe; use from the event loop.
    """

    def __init__(self, most_bytes: int = _MOST_ANSWER_BYTES) -> None:
        self._most_bytes = most_bytes
        self._unread: dict[User, int] = {}

    def add(self, user: User, size: int) -> Callable[[], None] | None:
        """Count an answer of `size` bytes, and return the function that ends that; None for a small one, not counted.

        Raises RefusedError (QUEUE_FULL) if the user has too many bytes unread.
        """
        if size <= _SMALL_BYTES:
            return None
        unread = self._unread.get(user, 0)
        if unread + size > self._most_bytes:
            raise refuse(
                Reason.QUEUE_FULL,
                f"cannot answer one more call: {unread} bytes of answers to this user are not taken yet",
                "read the answers, or try again later",
            )
        self._unread[user] = unread + size

        def release() -> None:
            left = self._unread[user] - size
            if left:
                self._unread[user] = left
            else:
                del self._unread[user]

        return release


class CallLimits:
    """The call limits of one socket, one for each kind of call."""

    def __init__(self, most: int) -> None:
        """Allow `most` streams (requests and watches) and as many other calls; of each, one user may have half."""
        half = (most + 1) // 2
        # Root and the agent's own user could stop it anyway.
        self._streams = CallLimit(most, "requests and watches", most_per_user=half, unbounded=(_ROOT, own_uid()))
        self._others = CallLimit(most, "other calls", most_per_user=half)
        self._always = CallLimit(math.inf, "calls that end or renew a lease")

    def of(self, method: str, *, streams: bool) -> CallLimit:
        """Return the limit that applies to a method; `streams`: whether its answers are a stream."""
        if method in _ALWAYS_TAKEN:
            return self._always
        return self._streams if streams else self._others


User = int | str | None


class OpeningStreams:
    """Bounds the streams of each user on which no request has arrived yet. Not thread-safe; use from the event loop.

    In a burst a request may be behind the headers of thousands of other streams, which gRPC does not read while the
    maximum number of calls is open. Unless the oldest stream is refused then, all would wait for each other.
    """

    def __init__(self, most: Callable[[User], float]) -> None:
        """Limit by `most`, which returns how many streams a user may have open now: at least one."""
        self._most = most
        self._waiting: dict[User, dict[asyncio.Timeout, None]] = {}
        """Per user the timeout of each stream that waits, the oldest first."""

    def __len__(self) -> int:
        """Return the number of streams that wait, of all users."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def waiting(self, user: User) -> AsyncIterator[None]:
        """Limit the time for which the block may wait for the first message of a stream.

        Raises UsageError if none arrives within FIRST_MESSAGE_SECONDS, and RefusedError (QUEUE_FULL) if this stream is
        evicted because the user has opened too many newer ones.
        """
        self._evict_oldest(user)
        limit = asyncio.timeout(FIRST_MESSAGE_SECONDS)
        try:
            async with limit:
                self._waiting.setdefault(user, {})[limit] = None
                yield
        except TimeoutError:
            if limit not in self._waiting.get(user, {}):
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
            self._forget(user, limit)

    def _evict_oldest(self, user: User) -> None:
        """End the wait of the user's oldest stream if the user is at the limit."""
        streams = self._waiting.get(user, {})
        if len(streams) >= self._most(user):
            oldest = next(iter(streams), None)
            if oldest is not None:
                self._forget(user, oldest)
                if not oldest.expired():
                    oldest.reschedule(asyncio.get_running_loop().time())

    def _forget(self, user: User, limit: asyncio.Timeout) -> None:
        streams = self._waiting.get(user, {})
        streams.pop(limit, None)
        if not streams:
            self._waiting.pop(user, None)


def most_open(most: int) -> int:
    """Return how many calls one user can have open under `CallLimits(most)`, streams without a request included."""
    return most + EXTRA_STREAMS + (most + 1) // 2


Context = grpc.aio.ServicerContext[Any, Any]
"""The context of a call. Its message types differ by method; each handler knows its own."""
Handler = Callable[[Any, Context], Awaitable[Message | None]]
"""A unary method returns its answer; a streaming one writes them to the context and returns None.

A method whose client streams, too, is called with the first message (None if the client sent none) and reads the others
with `next_message`.
"""

OnRefused = Callable[[str, object, Context, Refusal], None]
"""Called for each refused call with its method, its message, its context and the refusal."""

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
    """Replaces a request that cannot be parsed, or that contains a text which is not allowed."""

    def __init__(self, error: UsageError | None = None) -> None:
        """Keep what is wrong with a text; None means that the bytes are no message of the method."""
        self.error = error


def _ignore_refusal(_method: str, _message: object, _context: Context, _refusal: Refusal) -> None:
    return


def method_handlers(
    servicer: object, most_calls: int, on_refused: OnRefused = _ignore_refusal
) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
    """Make a handler for each method of the service from the servicer's coroutine of the same name in snake_case.

    Together the handlers serve at most `most_calls` calls of each kind at once. Raises AttributeError if the servicer
    lacks a coroutine.
    """
    limits, unread = CallLimits(most_calls), UnreadAnswers()
    handlers = {}
    for method in SERVICE.methods:
        limit = limits.of(method.name, streams=method.server_streaming)
        answer = getattr(servicer, _snake_case(method.name))
        opening = OpeningStreams(partial(_most_streams, limit)) if method.client_streaming else None
        call = _guarded(answer, method.name, limit, unread, on_refused, opening=opening)
        make = _MAKERS[method.client_streaming, method.server_streaming]
        handlers[method.name] = make(
            call,
            request_deserializer=reader(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return handlers


async def next_message(context: Context, method: str) -> Any:  # noqa: ANN401 -- the method's own type of message
    """Read the next message of a client that streams; None if the client has ended its half of the stream.

    Raises RefusedError (INVALID_REQUEST) for bytes that are no message of the method.
    """
    message = await context.read()
    if isinstance(message, Unreadable):
        raise RefusedError(unreadable(method, _DEFINITION, message.error))
    return None if message is grpc.aio.EOF else message


async def abort(context: Context, refusal: Refusal) -> None:
    """End the call with the status of the refusal, and its details in the trailer. Always raises AbortError."""
    await context.abort(
        STATUS[refusal.reason],
        shortened(visible(refusal.message), LONGEST_WORDS),
        trailing_metadata=((TRAILER, trailer_of(refusal)),),
    )


def _most_streams(limit: CallLimit, user: User) -> float:
    """Return how many streams without a request a user may have open now."""
    return limit.remaining(user) + EXTRA_STREAMS


def _guarded(
    call: Handler,
    name: str,
    limit: CallLimit,
    unread: UnreadAnswers,
    on_refused: OnRefused,
    *,
    opening: OpeningStreams | None,
) -> Handler:
    """Apply the limits to a method and turn its errors into statuses; `opening` is given if the client streams, too."""

    async def guarded(message: object, context: Context) -> Message | None:
        try:
            if opening is not None:
                async with opening.waiting(_user_of(context)):
                    message = await next_message(context, name)
            if not isinstance(message, Unreadable):
                with limit.slot(_user_of(context)):
                    answer = await call(message, context)
                if answer is not None:
                    _count_until_read(answer, unread, context)
                return answer
            await abort(context, unreadable(name, _DEFINITION, message.error))
        except RefusedError as error:
            on_refused(name, message, context, error.refusal)
            await abort(context, error.refusal)
        except UsageError as error:
            await abort(context, Refusal(reason=Reason.INVALID_REQUEST, message=error.message, hint=error.hint))
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except grpc.aio.InternalError:  # the client disconnected while an answer was written
            raise asyncio.CancelledError from None
        except Exception:  # noqa: BLE001 -- the caller gets a message, the log gets the traceback
            _log.exception("a call of the API failed unexpectedly", method=name)
            await context.abort(
                grpc.StatusCode.INTERNAL,
                f"cannot complete {name}: the agent failed in a way that it did not expect; its log tells more",
            )
        raise AssertionError("abort returns never")

    return guarded


def _count_until_read(answer: Message, unread: UnreadAnswers, context: Context) -> None:
    """Count an answer until the call has ended. Raises RefusedError if the caller does not read its answers."""
    release = unread.add(_user_of(context), answer.ByteSize())
    if release is not None:
        context.add_done_callback(lambda _: release())  # type: ignore[arg-type]  # a Protocol, by its parameter


def _user_of(context: Context) -> User:
    """Return the key under which calls and answers are limited: the uid on Unix sockets, the connection over TCP."""
    peer = peer_from(context.peer())
    return context.peer() if peer is None else peer.uid


def unreadable(method: str, definition: str, error: UsageError | None = None) -> Refusal:
    """Return the refusal of a message: `error` if one of its texts is not allowed, else that it cannot be parsed.

    `definition` is the .proto file that defines the message.
    """
    if error is not None:
        return Refusal(reason=Reason.INVALID_REQUEST, message=error.message, hint=error.hint)
    return Refusal(
        reason=Reason.INVALID_REQUEST,
        message=f"cannot read the message of {method}: it is not what the API defines",
        hint=f"make it from {definition}",
    )


def reader(message: type[Message]) -> Callable[[bytes], object]:
    """Make a deserialiser that returns `Unreadable` instead of raising, and checks the texts of the message."""

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

    Fields that this version does not know are not checked; nothing uses them.
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
    """Yield the paths of all text fields in a message, such as `request.holder.name`."""
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield field.name
        elif field.message_type is not None:
            yield from (f"{field.name}.{each}" for each in texts_within(field.message_type))


@cache
def _fields_with_texts(message: Descriptor) -> tuple[str, ...]:
    """Return the names of the fields that are a text or contain one at any depth; computed once per message type.

    Raises AssertionError for a map, which no request has yet: its values would need a check of their own.
    """
    for field in message.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            raise AssertionError(f"cannot check the texts in {field.full_name}: it is a map")
    return tuple(dict.fromkeys(path.partition(".")[0] for path in texts_within(message)))
