"""From the queue to the end of an attempt: admit, start in Ray, watch, cancel, try again.

Decisions are pure functions (decide.py); the loop around them does the I/O.
"""
