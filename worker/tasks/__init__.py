"""One-shot processes: `python -m worker.tasks profile|export|remove|verify`, each ends with a task_result line.

May import every other package of worker. Need no Ray and no control plane; `remove` needs no torch.
"""
