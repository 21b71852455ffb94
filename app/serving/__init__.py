"""The HTTP server around the application: its start and end, its connections and their bounds, TLS."""
