"""The faces of the agent towards programs: the gRPC API and metrics. They translate and decide nothing."""
