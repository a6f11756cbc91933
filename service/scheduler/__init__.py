"""The scheduler: a library of pure functions from a spec to a proved plan; `planner.make_plan` is its entry.

No I/O, no clock, no database, no Ray: it imports worker.contract and nothing else outside. kernels are below problem,
which is below schedules, search, programs and resharding; auto and planner join them; job plans whole training jobs.
"""
