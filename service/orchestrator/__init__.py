"""From the queue to the end of an attempt: admit, start in Ray, watch, cancel, try again.

Decisions are pure functions (decide.py); the loop goes rounds over rooms that do the I/O: admission,
submission, watching, logs, tidying. Knows the store and Ray's HTTP API; never the REST API.
"""
