"""Code common to all gRPC methods: checks of the texts in messages, and refusals that become statuses.

The handlers are made from the service's descriptor, not by the generated servicer. So a message that cannot be parsed
gets a message and a hint like any other invalid request, and no exception reaches the client as a traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Final

import grpc
import structlog
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from mig_agent.adapters.grpc_errors import LONGEST_WORDS, STATUS, TRAILER, shortened, trailer_of
from mig_agent.adapters.transport.peer_credentials import peer_from
from mig_agent.core.errors import Reason, Refusal, RefusedError, UsageError
from mig_agent.core.texts import check_text, visible
from mig_agent.frontends.grpc.call_limits import (
    EXTRA_STREAMS,
    CallLimit,
    CallLimits,
    OpeningStreams,
    UnreadAnswers,
    User,
)
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

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
        user = _user_of(context)
        try:
            if opening is not None:
                async with opening.waiting(user):
                    message = await next_message(context, name)
            if not isinstance(message, Unreadable):
                with limit.slot(user):
                    answer = await call(message, context)
                if answer is not None:
                    _count_until_read(answer, unread, user, context)
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


def _count_until_read(answer: Message, unread: UnreadAnswers, user: User, context: Context) -> None:
    """Count an answer until the call has ended. Raises RefusedError if the caller does not read its answers."""
    release = unread.add(user, answer.ByteSize())
    if release is not None:
        context.add_done_callback(lambda _: release())  # type: ignore[arg-type]  # a Protocol, by its parameter


def _user_of(context: Context) -> User:
    """Return the key under which calls and answers are limited: the uid on Unix sockets, the connection over TCP."""
    address = context.peer()
    peer = peer_from(address)
    return address if peer is None else peer.uid


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
