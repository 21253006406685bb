"""NVML's return codes and the failure that carries one, as `nvml.h` numbers them."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """`nvmlReturn_t`; the names are those of nvml.h without their prefix."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    ALREADY_INITIALIZED = 5
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    TIMEOUT = 10
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    IN_USE = 19
    MEMORY = 20
    INSUFFICIENT_RESOURCES = 23
    ARGUMENT_VERSION_MISMATCH = 25
    NOT_READY = 27
    INVALID_STATE = 29
    UNKNOWN = 999


def name_of(code: int) -> str:
    """Return the name of a code, such as `IN_USE`, or its number if it is not in `Code`."""
    return Code(code).name if code in set(Code) else str(code)


class Failure(Exception):  # noqa: N818 -- an answer of the driver, not an error of the simulator
    """The code with which a call fails."""

    def __init__(self, code: int) -> None:
        super().__init__(f"NVML code {code}")
        self.code = code


class SimulatorError(Exception):
    """The simulator itself cannot do what it was asked; the message starts with "cannot"."""
