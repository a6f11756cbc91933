"""The planning problem: spec, its arrays (Problem), a timeline of it, and what that costs in memory and time.

Imports kernels and worker.contract; knows no schedule by name, no search and no program.
"""
