"""Sockets of the agent: Unix sockets, TCP with mTLS, and the relay that tells gRPC who is connected."""
