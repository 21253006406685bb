"""Serves grpc.health.v1 and server reflection with handlers of our own.

The libraries' own handlers log a traceback for each message that cannot be parsed. These refuse it with a message and a
hint, as the API's methods do, and log nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection, reflection_pb2

from mig_agent.core.errors import RefusedError
from mig_agent.frontends.grpc.call_limits import CallLimit
from mig_agent.frontends.grpc.handlers import Context, Unreadable, abort, reader, unreadable

HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION: Final = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


def probe_handlers(
    checks: health.HealthServicer, reflected: reflection.aio.ReflectionServicer, most_calls: int
) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
    """Make a handler for each method of health and reflection, by full name.

    Together they serve at most `most_calls` calls at once.
    """
    limit = CallLimit(most_calls, "calls of health and reflection")

    async def check(message: object, context: Context) -> Message:
        async with _refusing(limit, context):
            answer: Message = await checks.Check(_readable(message, "Check", HEALTH), context)
            return answer
        raise AssertionError("abort returns never")

    async def watch(message: object, context: Context) -> None:
        async with _refusing(limit, context):
            await checks.Watch(_readable(message, "Watch", HEALTH), context)

    async def info(messages: AsyncIterator[object], context: Context) -> None:
        async with _refusing(limit, context):
            requests = (_readable(each, "ServerReflectionInfo", REFLECTION) async for each in messages)
            async for answer in reflected.ServerReflectionInfo(requests, context):
                await context.write(answer)

    request, answer = reader(health_pb2.HealthCheckRequest), health_pb2.HealthCheckResponse.SerializeToString
    return {
        f"{HEALTH.full_name}/Check": grpc.unary_unary_rpc_method_handler(check, request, answer),
        f"{HEALTH.full_name}/Watch": grpc.unary_stream_rpc_method_handler(watch, request, answer),
        f"{REFLECTION.full_name}/ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            info,
            reader(reflection_pb2.ServerReflectionRequest),
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        ),
    }


@asynccontextmanager
async def _refusing(limit: CallLimit, context: Context) -> AsyncIterator[None]:
    """Occupy a slot for one call while the block runs; end the call with a status if the block raises RefusedError."""
    try:
        with limit.slot():
            yield
    except RefusedError as error:
        await abort(context, error.refusal)
    except grpc.aio.InternalError:  # the caller went away while it was written to
        raise asyncio.CancelledError from None


def _readable(message: object, method: str, service: ServiceDescriptor) -> Any:  # noqa: ANN401 -- a message
    """Return the message. Raises RefusedError (INVALID_REQUEST) if it could not be parsed."""
    if isinstance(message, Unreadable):
        raise RefusedError(unreadable(method, service.file.name, message.error))
    return message
