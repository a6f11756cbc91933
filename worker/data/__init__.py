"""Reads training data: data sets and streams, sampling, collating, loader processes, prefetch to the GPU.

Knows steps and microbatches; must not know stages, the engine, or the driver.
"""
