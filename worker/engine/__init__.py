"""Runs the program of one mesh, step after step: actions, lanes, stages, transfers, optimizer. One entry: `Engine`.

May import parallel, model, transport and contract. Must not know schedules, Ray, the driver or the control
plane.
"""
