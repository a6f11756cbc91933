"""Verbs that do their work on this machine, without a server: a job is checked, measured and planned, or verified."""
