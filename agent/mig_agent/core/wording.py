"""How messages name what was asked for and which GPUs are meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mig_agent.core.model import Gpu, Request, Want
from mig_agent.core.quantities import format_memory, shown


def want_words(want: Want) -> str:
    """`4G`, `2g.10gb`, `the fraction 0.25 of a GPU`, `a whole GPU`, with what else it must have."""
    words = "a device"
    if want.whole_gpu:
        words = "a whole GPU"
    elif want.profile is not None:
        words = shown(want.profile)
    elif want.memory_bytes is not None:
        words = shown(want.text) if want.text else format_memory(want.memory_bytes)
    elif want.fraction is not None:
        words = f"the fraction {shown(want.text) if want.text else f'{want.fraction:g}'} of a GPU"
    extras = [f"with {name}" for name in sorted(want.attributes)]
    if want.min_compute_slices > 1:
        extras.append(f"with at least {want.min_compute_slices} compute slices")
    return " ".join((words, *extras))


def several(wants: Sequence[Want]) -> str:
    """`4G`, `3 devices of 4G`, `2 whole GPUs`, `2 devices (2g.10gb, 4G)`."""
    words = [want_words(want) for want in wants]
    if len(words) == 1:
        return words[0]
    if len(set(words)) == 1:
        return f"{len(words)} whole GPUs" if wants[0].whole_gpu else f"{len(words)} devices of {words[0]}"
    most = 6
    listed = ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
    return f"{len(words)} devices ({listed})"


def each_gpu(gpus: Iterable[Gpu]) -> str:
    """`GPU 0`, `GPUs 0, 2`."""
    numbers = [str(gpu.index) for gpu in gpus]
    return f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPUs {', '.join(numbers)}"


def here(request: Request, gpus: Sequence[Gpu]) -> str:
    """Where a request may be served: `on this node`, or `on GPU 1` when it named GPUs."""
    return f"on {each_gpu(gpus)}" if request.gpus and gpus else "on this node"
