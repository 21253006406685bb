"""`mig-agent demo`: the agent's main job over simulated GPUs, shown step by step and checked while it is shown."""

from mig_agent.demo.show import show

__all__ = ["show"]
