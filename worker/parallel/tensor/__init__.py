"""Tensor parallelism: a stage's graph rewritten for one worker of a tensor-parallel group.

Must not know engines, transports (only the protocol `GroupCommunicator`) or schedules.
"""
