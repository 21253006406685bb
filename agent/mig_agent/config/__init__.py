"""Settings of the agent: file, environment and flags, in rising order."""

from mig_agent.config.addresses import Address, TcpAddress, UnixAddress, parse_address
from mig_agent.config.load import load
from mig_agent.config.settings import DEFAULT_SOCKET, Settings

__all__ = ["DEFAULT_SOCKET", "Address", "Settings", "TcpAddress", "UnixAddress", "load", "parse_address"]
