"""Pods that nobody has to register: from a file, from DNS, from Kubernetes, and from the engines themselves."""
