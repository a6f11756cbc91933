"""Measures the inputs of a plan: layers, the engine's own overhead, optimizer updates, links between meshes.

May import engine, parallel, model, transport and contract. Must not know actors, the driver, plans or Ray.
"""
