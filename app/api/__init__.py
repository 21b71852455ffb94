"""The HTTP face: one file a resource, each handler reads a body, calls the service and writes an answer."""
