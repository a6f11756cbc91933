"""Explains a step's duration: a plan and one step's measured slots in, causes and suggested changes out.
`explain.explain` is the entry point. Pure; may import the planner and job, knows no store and no HTTP.
"""
