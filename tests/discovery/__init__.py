"""Discovery against a real DNS server, real HTTP that speaks the Kubernetes API, real files, simulated pods."""
