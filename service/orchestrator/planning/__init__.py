"""Planning in worker processes: the bounded pool, and the functions that run in it.

The only room of the orchestrator that imports the scheduler, and only inside functions that run in the pool.
"""
