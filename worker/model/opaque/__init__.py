"""Modules of a model that no trace can take: recorded while the model is exported, run as they are in stages.

Knows nothing of stages, layers or jobs.
"""
