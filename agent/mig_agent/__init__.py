"""mig-agent: turns a request for GPU memory into a MIG instance."""

__version__ = "0.1.0"
