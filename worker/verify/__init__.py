"""Proof on a user's own model: its pipeline beside the plain model on one worker, step by step."""
