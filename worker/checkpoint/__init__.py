"""Checkpoints and weights in files: own format, model record, initial weights, exports (safetensors, DCP).

Knows names and tensors of the whole model; must not know stages, the engine's lanes, or the driver.
"""
