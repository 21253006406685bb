"""A program that takes the steps of `simulated-cuda` on a real GPU, by libcuda: init, then alloc=MiB and info.

Started by path, as a process of its own. It prints what the stand-in prints, so that one test holds both to the same.
"""

from __future__ import annotations

import ctypes
import os
import sys

MIB = 1 << 20


class CudaFailedError(Exception):
    """A call of libcuda failed."""


def main(steps: list[str]) -> int:
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            cuda.cuGetErrorName(code, ctypes.byref(text))
            raise CudaFailedError(f"{(text.value or b'CUDA_ERROR_UNKNOWN').decode()} ({code})")

    def take(step: str) -> str:
        name, _, value = step.partition("=")
        if name == "init":
            device, context = ctypes.c_int(), ctypes.c_void_p()
            call("cuInit", 0)
            call("cuDeviceGet", ctypes.byref(device), 0)
            call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            call("cuCtxSetCurrent", context)
            return f"ok, pid {os.getpid()}"
        if name == "info":
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            return f"free {free.value // MIB} MiB, total {total.value // MIB} MiB"
        if name == "hold":
            sys.stdin.read()
            return "ok"
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(int(value) * MIB))
        return "ok"

    for step in ("init", *steps):
        try:
            print(f"{step}: {take(step)}", flush=True)  # noqa: T201 -- what a program is for
        except CudaFailedError as error:
            print(f"{step}: {error}", flush=True)  # noqa: T201 -- the same
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
