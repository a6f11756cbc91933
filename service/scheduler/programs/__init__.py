"""Timelines to instruction lists and back: compile, decode, replay, check, and the Plan that carries them.

Imports problem and kernels (and types of resharding); must not know how a timeline was found.
"""
