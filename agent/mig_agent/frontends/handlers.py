"""What every method of the API has in common: refusals become statuses, and nothing else escapes as a traceback.

The handlers are made here from the service's own descriptor, rather than by the generated servicer, so that a message
that cannot even be read is answered in words like any other mistake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from mig_agent.adapters.grpcerrors import LONGEST_WORDS, STATUS, TRAILER, shortened, trailer_of
from mig_agent.adapters.peers import peer_from
from mig_agent.core.errors import Reason, Refusal, RefusedError, UsageError
from mig_agent.frontends.room import Answers, Room, Rooms
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
"""The types of messages differ by method; each handler knows its own."""
Handler = Callable[[Any, Context], Awaitable[Message | None]]
"""A unary method returns its answer; a streaming one writes them to the context and returns None."""

OnRefused = Callable[[str, object, Context, Refusal], None]
"""Hears of each refused call, with its method and message."""

SERVICE: Final = pb.DESCRIPTOR.services_by_name["PartitionManager"]

_log = structlog.get_logger(__name__)


class Unreadable:
    """Stands for a request whose bytes are no message of its method."""


def _nobody_listens(_method: str, _message: object, _context: Context, _refusal: Refusal) -> None:
    return


def method_handlers(
    servicer: object, most_calls: int, on_refused: OnRefused = _nobody_listens
) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
    """A handler for each method of the service, from the coroutine of the same name in snake_case.

    Together they take so many calls of each kind at once. Raises AttributeError when the servicer lacks one.
    """
    rooms, answers = Rooms(most_calls), Answers()
    handlers = {}
    for method in SERVICE.methods:
        room = rooms.of(method.name, streams=method.server_streaming)
        call = _guarded(getattr(servicer, _snake_case(method.name)), method.name, room, answers, on_refused)
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            call,
            request_deserializer=reader(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return handlers


async def abort(context: Context, refusal: Refusal) -> None:
    """Ends the call with the status of the refusal and its details."""
    await context.abort(
        STATUS[refusal.reason],
        shortened(refusal.message, LONGEST_WORDS),
        trailing_metadata=((TRAILER, trailer_of(refusal)),),
    )


def _guarded(call: Handler, name: str, room: Room, answers: Answers, on_refused: OnRefused) -> Handler:
    async def guarded(message: object, context: Context) -> Message | None:
        try:
            if not isinstance(message, Unreadable):
                with room.place(_who(context)):
                    answer = await call(message, context)
                if answer is not None:
                    _hold(answer, answers, context)
                return answer
            await abort(context, unreadable(name, "proto/migagent/v1/partition_manager.proto"))
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
    """Whose answers share one bound: those of one user on Unix sockets, and of one connection over TCP."""
    peer = peer_from(context.peer())
    return context.peer() if peer is None else peer.uid


def unreadable(method: str, definition: str) -> Refusal:
    """Refuses a message that cannot be read. `definition` is the file that defines it."""
    return Refusal(
        reason=Reason.INVALID_REQUEST,
        message=f"cannot read the message of {method}: it is not what the API defines",
        hint=f"make it from {definition}",
    )


def reader(message: type[Message]) -> Callable[[bytes], object]:
    """Makes a deserialiser that answers `Unreadable` for bytes that are no such message."""

    def read(serialised: bytes) -> object:
        try:
            return message.FromString(serialised)
        except DecodeError:
            return Unreadable()

    return read


def _snake_case(name: str) -> str:
    return "".join("_" + each.lower() if each.isupper() else each for each in name).lstrip("_")
