"""The driver of one attempt, a Ray job (`python -m worker.driver`): gang, planning, steps, checkpoints, reports.

May import every other package of worker but tasks; what one accelerator does is worker/actor, which knows nothing of
this package. Only control_plane_client talks to the control plane. control_plane_client, limits, metrics,
slot_metrics, reporter, step_measurement and stopping need neither torch nor Ray.
"""
