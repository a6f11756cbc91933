"""REDUCE and STEP of one mesh: gradient sums, loss scale, clipping, the update (replicated or ZeRO-1) and its state.

Must not know programs, lanes' threads or microbatches.
"""
