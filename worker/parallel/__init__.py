"""Process groups, collectives inside stages, resharding, shard specs, synchronised BatchNorm and tensor parallelism.

May import model, transport and contract. Must not know engines, programs or schedules.
"""
