"""Refusals of wants that would need MIG instances, or larger shares, on GPUs of which none is in MIG mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.model import Gpu, Isolation, Profile, Want
from mig_agent.core.planning.blockers import describe_gpus, describe_want
from mig_agent.core.quantities import format_mib


def too_large_for_a_share(want: Want, gpus: Sequence[Gpu]) -> Refusal | None:
    """Return the refusal of an amount that only shares could serve, and that no GPU can share."""
    shared = [gpu for gpu in gpus if gpu.layout.shares is not None]
    terms = [gpu.layout.shares for gpu in shared if gpu.layout.shares is not None]
    amount = want.memory_bytes is not None or want.fraction is not None
    if not terms or not amount or any(instance_profiles(gpu) for gpu in gpus):
        return None
    if want.isolation is Isolation.MIG:
        return Refusal(
            reason=Reason.NO_MIG_GPU,
            message=f"cannot place {describe_want(want)} in a MIG instance: {describe_gpus(gpus)} {is_or_are(gpus)} "
            "not in MIG mode",
            hint="without --isolation mig a share of a GPU would serve it",
        )
    if all(each.way(has_process=want.has_process) is None for each in terms):
        return Refusal(
            reason=Reason.NOT_SUPPORTED,
            message=f"cannot place {describe_want(want)}: the memory limit of a share of {describe_gpus(shared)} holds "
            "for a process that is handed over, and there is none",
            hint="`migctl run` hands its command over; --num-gpus 1 takes a whole GPU",
        )
    most = max(each.usable_mib - each.overhead_mib for each in terms)
    least = min(each.least_mib for each in terms)
    if want.fraction is not None and not any(each.limit_of_fraction(1.0) is None for each in terms):
        hint = f"a share has at least {format_mib(least)}"
    else:
        whole = max(gpu.layout.memory_mib for gpu in gpus)
        enough = want.memory_bytes is None or want.memory_bytes <= whole << 20
        beyond = f"--num-gpus 1 takes a whole GPU ({format_mib(whole)})" if enough else _whole_is_too_small(whole)
        hint = f"ask for at most {format_mib(most)}; {beyond}"
    return Refusal(
        reason=Reason.TOO_LARGE,
        message=f"cannot place {describe_want(want)}: a share of {describe_gpus(shared)} has {format_mib(least)} to "
        f"{format_mib(most)}",
        hint=hint,
    )


def no_mig_gpu(want: Want, gpus: Sequence[Gpu]) -> Refusal | None:
    """Return the refusal of a want where no GPU is in MIG mode, with why none is shared if a share could serve it."""
    if any(instance_profiles(gpu) for gpu in gpus):
        return None
    could_share = (want.memory_bytes is not None or want.fraction is not None) and want.isolation is not Isolation.MIG
    modes = _by_words(gpus, _mode_words)
    why = " and ".join(f"{describe_gpus(have)} {_have(have)} {words}" for words, have in modes.items())
    if could_share:
        why += f" and {is_or_are(gpus)} not shared" if len(modes) == 1 else ", and none of them is shared"
    hints = [f"`migctl mode enable --gpu {gpu.index}` switches MIG mode on" for gpu in gpus if gpu.mode.capable][:1]
    if could_share:
        reasons = _by_words([gpu for gpu in gpus if gpu.not_shared], lambda gpu: gpu.not_shared)
        hints += [f"{describe_gpus(these)} cannot be shared: {reason}" for reason, these in reasons.items()]
        hints += [] if reasons else ["`migctl doctor` tells why no GPU is shared"]
    whole = max(gpu.layout.memory_mib for gpu in gpus)
    if want.memory_bytes is None or want.memory_bytes <= whole << 20:
        hints.append(f"{'or ' if hints else ''}take a whole GPU: --num-gpus 1")
    else:
        hints.append(_whole_is_too_small(whole))
    return Refusal(
        reason=Reason.NO_MIG_GPU, message=f"cannot place {describe_want(want)}: {why}", hint="; ".join(hints)
    )


def _by_words(gpus: Sequence[Gpu], words_of: Callable[[Gpu], str]) -> dict[str, list[Gpu]]:
    """Return the GPUs by what is said of each, in order: it is said once for all of which it is true."""
    found: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        found.setdefault(words_of(gpu), []).append(gpu)
    return found


def _mode_words(gpu: Gpu) -> str:
    """Return what a GPU has in place of MIG instances, as messages name it."""
    if not gpu.mode.capable:
        return "no MIG mode"
    if gpu.mode.current:
        return "no profile"
    return "MIG mode only after the next reset" if gpu.mode.pending else "MIG mode off"


def _have(gpus: Sequence[Gpu]) -> str:
    return "has" if len(gpus) == 1 else "have"


def _whole_is_too_small(whole_mib: int) -> str:
    return f"a whole GPU has {format_mib(whole_mib)}"


def instance_profiles(gpu: Gpu) -> tuple[Profile, ...]:
    """Return the profiles of a GPU that are MIG instances; none where it is not in MIG mode."""
    return tuple(profile for profile in gpu.layout.profiles if profile.kind.needs_mig_mode)


def is_or_are(gpus: Sequence[Gpu]) -> str:
    """Return the verb that follows these GPUs."""
    return "is" if len(gpus) == 1 else "are"
