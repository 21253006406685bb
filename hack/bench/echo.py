"""The baseline: a gRPC server on a Unix socket that answers bytes with the same bytes and does nothing else."""

from __future__ import annotations

import asyncio
import sys

import grpc

METHOD = "/bench.Echo/Echo"


async def _echo(request: bytes, _context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return request


async def serve(address: str) -> None:
    """Serve until killed; print a line when ready."""
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("bench.Echo", {"Echo": grpc.unary_unary_rpc_method_handler(_echo)})
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
