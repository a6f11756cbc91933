"""Checks before the first step: export against model, replicas against each other, sharded against whole stages.

May import `engine`, `parallel`, `model` and `contract`. Must not know drivers, Ray or plans.
"""
