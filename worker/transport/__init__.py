"""Moves tensors between the workers of a pipeline: one interface, over gloo, NCCL or threads of one process.

Knows ranks, tags and groups. Must not know stages, programs or schedules.
"""
