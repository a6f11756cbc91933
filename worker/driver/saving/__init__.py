"""Saves beside training: follows what workers write, on disk or to the keepers of copies, and decides when copies are taken.

Calls workers through the driver's gang; must not know steps, plans or the control plane.
"""
