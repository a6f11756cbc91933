"""From a user's nn.Module to stages: export, layers, cuts, serialization, random operations, tolerances.

May import `transport` and `contract`. Must not know engines, meshes, jobs, Ray or schedules.
"""
