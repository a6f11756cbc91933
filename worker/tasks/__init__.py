"""One-shot processes: `python -m worker.tasks check|profile|export|remove|verify`, each ends with a task_result line.

The control plane runs check, profile, export and remove as Ray tasks; verify never runs on Ray: the command `slotline
verify` starts it on its own machine. May import every other package of worker. Need no control plane, and nothing of
Ray themselves; `remove` needs no torch.
"""
