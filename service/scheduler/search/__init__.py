"""The search behind `auto`: rules, tabu search, CP-SAT, lower bounds that prove, and memory saving.

Imports problem and kernels; knows neither named schedules nor programs. Pure and deterministic: budgets count work.
"""
