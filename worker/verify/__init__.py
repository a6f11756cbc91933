"""Proof on a user's own model: its pipeline beside the plain model on one worker, step by step.

`proof.prove` is the entry in Python, `python -m worker.verify` that of the command. Light here: no torch.
"""
