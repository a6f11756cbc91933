"""One-shot processes: `python -m worker.tasks check|profile|export|release|remove|verify`, each ends with a task_result.

The control plane runs all but verify as Ray tasks; that never runs on Ray: the command `slotline verify` starts it on its
own machine. May import every other package of worker. Need no control plane, and nothing of Ray themselves but where Ray is
what they change; `release` and `remove` need no torch.
"""
