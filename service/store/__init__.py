"""What Slotline remembers: jobs, attempts, events, steps, plans, timelines, packages, tokens.

Knows SQL and the values of service.jobspec; never Ray, HTTP or the scheduler.
"""
