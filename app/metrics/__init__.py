"""What Prometheus reads; docs/operations.md says what each name is for.

Two kinds, by what they cost. Distributions (requests, match depths, event lag) are observed as they happen:
one observation a request or a batch, never one a block (distributions.py). All that the index, the sources and the
service count already is read when somebody scrapes, by a collector over their own figures (figures.py; names.py has
their names).

One registry for each application, none global: two applications in one process do not see each other's
figures. Labels are bounded: routes are templates, methods a fixed set, reasons a small fixed set, pods at
most `pods_max`; a pod's series end when the pod goes.
"""
