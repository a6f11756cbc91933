"""What a forward changes beside its result, found and put back: buffers, Python state, tensors that it makes.

Knows nothing of traces, stages or jobs.
"""
