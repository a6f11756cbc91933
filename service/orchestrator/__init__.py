"""From the queue to the end of an attempt: admit, submit to Ray, watch, stop, retry; also planning and one-shot tasks.

Decisions are pure functions (decisions/); everything else does their I/O. Knows the store and Ray's HTTP API; never
the REST API. Only planning/ imports the scheduler.
"""
