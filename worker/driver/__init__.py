"""The driver of one attempt, a Ray job (`python -m worker.driver`): gang, plan, step loop, reports.

What an accelerator does stands in worker/actor.py, which knows nothing of this package. `attempt` joins the
modules here; the others do not know it, and only `gang`, `attempt`, `planning` and `step_loop` know Ray.
"""
