"""The NVML adapter: the only door to the hardware. `Driver` is its face."""

from mig_agent.adapters.nvml.calls import OnCall
from mig_agent.adapters.nvml.driver import ChangeListener, Driver, Observation

__all__ = ["ChangeListener", "Driver", "Observation", "OnCall"]
