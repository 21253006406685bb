"""The gRPC API: `servicer` translates between messages and the engine."""
