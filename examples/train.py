"""Runs a program on a piece of a GPU, from Python: `python examples/train.py [COMMAND ...]`.

The lease lives as long as this process: however it ends, the device goes back.
"""

from __future__ import annotations

import os
import subprocess
import sys

from mig_agent.client import Client, NoAgent, Refused

DEFAULT = [sys.executable, "-c", "import os; print('training on', os.environ['CUDA_VISIBLE_DEVICES'])"]


def main(command: list[str]) -> int:
    """Return the command's exit code, or 75 (try again later) if there is no capacity now."""
    try:
        with Client() as client, client.lease(gpu_memory="4G", wait="30s", on_queued=tell_place) as lease:
            device = lease.devices[0]
            print(f"got {device.profile} with {device.memory_mib} MiB on GPU {device.gpu_index}", flush=True)
            return subprocess.run(command, env=os.environ | lease.env, check=False).returncode
    except (Refused, NoAgent) as error:
        print(f"{error}. {error.hint}", file=sys.stderr)
        return 75 if error.retryable else 1


def tell_place(position: int) -> None:
    """Print the position in the queue; called while the request waits."""
    print(f"waiting, number {position} in the queue", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or DEFAULT))
