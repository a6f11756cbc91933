"""Proof on a user's own model: its pipeline beside the plain model on one worker, step by step.

`proof.prove` is the entry in Python, `python -m worker.tasks verify` the command. Runs actors in threads, without
Ray.
"""
