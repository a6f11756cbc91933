"""Finds and puts back what a forward changes beside its result: buffers, Python state, tensors that it makes.

Knows nothing of traces, stages or jobs.
"""
