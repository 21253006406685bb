"""The agent's sockets: Unix sockets, TCP with mTLS, and the relay that passes each client's identity to gRPC."""
