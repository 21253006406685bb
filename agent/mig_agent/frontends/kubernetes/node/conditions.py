"""The node condition that shows GPUs which are lost or cordoned, and so not leased; pure.

As with node-problem-detector, `True` is a problem and `False` says that there is none. The condition is written only
when it changes, since nothing depends on its heartbeat.
"""

from __future__ import annotations

from typing import Final

from mig_agent.adapters.kubeapi import NodeCondition
from mig_agent.core.model import Gpu, GpuState, NodeView
from mig_agent.core.texts import visible

CONDITION: Final = "MigGpuProblem"
LOST: Final = "GpuLost"
CORDONED: Final = "GpuCordoned"
NONE: Final = "NoGpuProblem"
_LONGEST_REASON: Final = 200
_LONGEST_MESSAGE: Final = 2000
_PROBLEMS: Final = (GpuState.LOST, GpuState.CORDONED)


def has_mig(view: NodeView) -> bool:
    """Return whether any GPU of the node supports MIG; the agent does not change a node without one."""
    return any(gpu.mode.capable for gpu in view.gpus)


def condition_of(view: NodeView) -> NodeCondition | None:
    """Return the condition that the node should show; None: no condition."""
    if not has_mig(view):
        return None
    bad = [gpu for gpu in view.gpus if gpu.state in _PROBLEMS]
    if not bad:
        return NodeCondition(type=CONDITION, status="False", reason=NONE, message="no GPU is cordoned or lost")
    lost = any(gpu.state is GpuState.LOST for gpu in bad)
    return NodeCondition(
        type=CONDITION,
        status="True",
        reason=LOST if lost else CORDONED,
        message=visible("; ".join(_words(gpu) for gpu in bad))[:_LONGEST_MESSAGE],
    )


def _words(gpu: Gpu) -> str:
    reason = gpu.reason[:_LONGEST_REASON]
    state = gpu.state.value
    if reason.startswith(state):
        return f"GPU {gpu.index} ({gpu.uuid}): {reason}"
    return f"GPU {gpu.index} ({gpu.uuid}) is {state}{f': {reason}' if reason else ''}"
