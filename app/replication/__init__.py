"""Beyond one process: replicas that share a Redis."""
