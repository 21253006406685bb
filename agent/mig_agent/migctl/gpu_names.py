"""Finds the GPUs that `--gpu` names, or that a command can use, before anything is done to one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown

if TYPE_CHECKING:
    from mig_agent.client import Client
    from mig_agent.client.request_args import RequestArgs
    from mig_agent.client.types import Gpu, Status

ONE_MIG_DEVICE = "a process sees only one MIG device at a time"


def find_gpus(node: Status, names: Iterable[str]) -> tuple[Gpu, ...]:
    """Return the GPUs with these indices or UUIDs, each once, by index. Raises Refused for a name that is none."""
    from mig_agent.client import Refused  # noqa: PLC0415 -- the client is imported by now

    found: dict[str, Gpu] = {}
    for name in names:
        gpu = next((each for each in node.gpus if name.casefold() in {str(each.index), each.uuid.casefold()}), None)
        if gpu is None:
            listed = ", ".join(str(each.index) for each in node.gpus)
            silent = ", ".join(map(str, node.missing_gpus))
            raise Refused(
                reason="unknown-gpu",
                message=f"cannot find GPU {shown(name)} on {node.node}",
                hint=(f"it has GPU {listed}" if listed else "it has none")
                + (f"; no answer came yet from {silent}" if silent else ""),
            )
        found[gpu.uuid] = gpu
    return tuple(sorted(found.values(), key=lambda each: each.index))


def of_model(client: Client, asking: RequestArgs, model: str | None) -> RequestArgs:
    """Return a request for the GPUs that it names and whose model has `model` in its name, in any case of letters.

    Raises Refused if there are none, and UsageError for an empty text.
    """
    if model is None:
        return asking
    if not model.strip():
        raise UsageError("cannot take an empty text as a model of GPU", "write a part of its name, such as h100")
    from mig_agent.client import Refused  # noqa: PLC0415 -- the client is imported by now

    node = client.status()
    named = find_gpus(node, map(str, asking.get("gpus", ()))) or node.gpus
    chosen = [str(each.index) for each in named if model.casefold() in each.model.casefold()]
    if not chosen:
        models = ", ".join(dict.fromkeys(each.model for each in named))
        raise Refused(
            reason="unknown-gpu",
            message=f"cannot find a GPU of model {shown(model)} on {node.node}",
            hint=f"there is {models}" if models else "it has no GPU",
        )
    return {**asking, "gpus": chosen}


def for_one_process(client: Client, asking: RequestArgs, *, hint: str) -> RequestArgs:
    """Return a request for several whole GPUs with those GPUs alone that one process can use together.

    These are the ones that are not in MIG mode. Raises Refused if there are too few; `hint` is what to do instead.
    """
    from mig_agent.client import Refused  # noqa: PLC0415 -- the client is imported by now

    node = client.status()
    named = find_gpus(node, map(str, asking.get("gpus", ()))) or node.gpus
    usable = [each.index for each in named if not each.mig.current]
    wanted = asking.get("num_gpus") or len(asking.get("devices", ()))
    if len(usable) >= wanted or not named:
        return {**asking, "gpus": list(map(str, usable))}
    in_mig_mode = [each.index for each in named if each.mig.current]
    if len(named) < wanted:
        return asking  # the agent says that there are too few GPUs
    if usable:
        why = f"only GPU {_listed(usable)} {'is' if len(usable) == 1 else 'are'} without MIG mode"
    else:
        why = f"GPU {_listed(in_mig_mode)} {'is' if len(in_mig_mode) == 1 else 'are'} in MIG mode"
    raise Refused(
        reason="not-supported",
        message=f"cannot run one process on {wanted} whole GPUs: {why}, and {ONE_MIG_DEVICE}",
        hint=f"{hint}; an administrator switches MIG mode off with `migctl mode disable --gpu {in_mig_mode[0]}`",
    )


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
