"""Writes through the pointers that C callers pass. NULL raises Failure (INVALID_ARGUMENT)."""

from __future__ import annotations

import ctypes
from ctypes import c_uint, c_void_p
from typing import TypeVar

from mig_agent.simulator.codes import Code, Failure

Address = int | None
"""A pointer as a callback receives it; None for NULL."""

_Struct = TypeVar("_Struct", bound=ctypes.Structure)


def write_uint(address: Address, value: int) -> None:
    """Write to an `unsigned int *`."""
    if not address:
        raise Failure(Code.INVALID_ARGUMENT)
    c_uint.from_address(address).value = value


def write_handle(address: Address, handle: int) -> None:
    """Write to a pointer to a handle."""
    if not address:
        raise Failure(Code.INVALID_ARGUMENT)
    c_void_p.from_address(address).value = handle


def write_text(address: Address, length: int, text: str) -> None:
    """Write to a `char *` of `length` bytes. Raises Failure (INSUFFICIENT_SIZE) if the text is longer."""
    data = text.encode() + b"\0"
    if not address:
        raise Failure(Code.INVALID_ARGUMENT)
    if len(data) > length:
        raise Failure(Code.INSUFFICIENT_SIZE)
    ctypes.memmove(address, data, len(data))


def at(struct: type[_Struct], address: Address) -> _Struct:
    """Return the structure that a pointer points to."""
    if not address:
        raise Failure(Code.INVALID_ARGUMENT)
    return struct.from_address(address)
