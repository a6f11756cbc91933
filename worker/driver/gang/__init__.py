"""The workers of an attempt: where they run, how they are called and end, and what became of a lost one.

Calls Ray; must not know what workers compute.
"""
