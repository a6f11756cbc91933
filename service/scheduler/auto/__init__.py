"""The `auto` schedule: named schedules, recomputation and split backwards as choices around the search.
May import problem, kernels, schedules and search; knows no job, no layers and no programs. Pure.
"""
