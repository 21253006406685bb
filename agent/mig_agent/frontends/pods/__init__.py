"""The pods that leases were taken for, followed at the API server: a lease becomes its pod's, and ends with it."""
