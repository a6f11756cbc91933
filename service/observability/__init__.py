"""Metrics, outage logs and tracing of the control plane itself.

Imported by every other package of service; imports none of them.
"""
