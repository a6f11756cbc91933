"""Measures the inputs of a plan: layers, the engine's own overhead, optimizer updates, links between meshes;
and prices a job from what was measured (plan_request).

May import engine, parallel, model, transport and contract. Must not know actors, the driver, plans or Ray.
"""
