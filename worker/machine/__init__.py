"""The machine under a worker: its accelerator, its node and processor cores, its memory.

May import transport (a device has its own) and contract. Must not know jobs that are planned, engines, actors or drivers.
"""
