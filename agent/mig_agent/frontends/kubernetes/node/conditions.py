"""The node condition that shows GPUs which are not given to anybody; pure.

As node-problem-detector has it: `True` is a problem, `False` says that there is none. It is written only when it
changes: nobody waits for its heartbeat.
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
    """Whether any GPU of the node could be partitioned; a node without one is left as it is."""
    return any(gpu.mode.capable for gpu in view.gpus)


def condition_of(view: NodeView) -> NodeCondition | None:
    """What the node should show; None: nothing."""
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
