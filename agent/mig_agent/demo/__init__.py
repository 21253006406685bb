"""`mig-agent demo`: shows the agent's main task on simulated GPUs step by step, and checks each step."""

from mig_agent.demo.show import show

__all__ = ["show"]
