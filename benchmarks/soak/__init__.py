"""A soak: one `kvindexer serve` process under load and under attack at once, for a bounded time, and what it must keep.

    python -m benchmarks.soak --seconds 300 --json build/soak.json

What happens together, all of it over real sockets: simulated pods publish by ZMQ and post by HTTP, with frames lost
and doubled, caches cleared, engines killed and begun anew; routers ask with every body that has a fast way, and with
some that have none; strangers send malformed bytes by HTTP and ZMQ; clients send a byte at a time, nothing, or read
no answer; keys are rotated; the indexer itself is ended by SIGTERM and started again from its snapshot. Its bounds
are set so small that they are met.

What is checked: whenever the pods pause, every answer equals what the caches of the simulated engines hold, block by
block; a loss that cannot be made good is said; no 5xx but a 503 of a bound; no line of level ERROR; memory,
descriptors and threads are flat after the warm-up; the event loop answers in time; an orderly end.
"""
