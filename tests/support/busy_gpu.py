"""Keeps all multiprocessors of the one CUDA device that the process sees busy: `python -m support.busy_gpu SECONDS`.

It prints a line when the kernel runs. It goes through libcuda alone, which comes with the driver.
"""

from __future__ import annotations

import ctypes
import sys
import time

_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .u64 %begin, %now, %passed, %most;
    .reg .pred %again;
    ld.param.u64 %most, [nanoseconds];
    mov.u64 %begin, %globaltimer;
LOOP:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %again, %passed, %most;
    @%again bra LOOP;
    ret;
}
"""
_BLOCKS, _THREADS = 4096, 1024
"""More blocks than any device runs at once, so that no multiprocessor is without one until all are done."""
_KERNEL_SECONDS = 0.02


def main(seconds: float) -> None:
    """Run kernels for a time. Raises RuntimeError with the code of a call that fails."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with CUresult {code}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), _PTX)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"spin")
    nanoseconds = ctypes.c_uint64(int(_KERNEL_SECONDS * 1e9))
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(nanoseconds))
    until = time.monotonic() + seconds
    print("busy", flush=True)  # noqa: T201 -- the test waits for it
    while time.monotonic() < until:
        call("cuLaunchKernel", kernel, _BLOCKS, 1, 1, _THREADS, 1, 1, 0, None, arguments, None)
        call("cuCtxSynchronize")


if __name__ == "__main__":
    main(float(sys.argv[1]))
