"""The NVML adapter, the agent's only access to the hardware; `Driver` is its public API."""

from mig_agent.adapters.nvml.calls import OnCall
from mig_agent.adapters.nvml.driver import ChangeListener, ComputeMode, Driver, MemoryLimit, Observation

__all__ = ["ChangeListener", "ComputeMode", "Driver", "MemoryLimit", "Observation", "OnCall"]
