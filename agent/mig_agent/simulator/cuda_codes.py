"""The result codes of CUDA's driver API that the simulator answers, as cuda.h numbers them."""

from __future__ import annotations

from enum import IntEnum


class CudaCode(IntEnum):
    """`CUresult`; the names are those of cuda.h without `CUDA_ERROR_`."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    DEVICE_UNAVAILABLE = 46
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_CONTEXT = 201
    ILLEGAL_ADDRESS = 700
    MPS_CONNECTION_FAILED = 805
    MPS_RPC_FAILURE = 806
    MPS_SERVER_NOT_READY = 807
    MPS_MAX_CLIENTS_REACHED = 808
    MPS_MAX_CONNECTIONS_REACHED = 809
    MPS_CLIENT_TERMINATED = 810


class CudaError(Exception):
    """The answer of a failed call."""

    def __init__(self, code: CudaCode) -> None:
        super().__init__(f"CUDA_ERROR_{code.name}")
        self.code = code
