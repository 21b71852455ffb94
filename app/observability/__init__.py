"""Logs, ids of requests and spans, and what none of them may show. Metrics are in app/metrics."""
