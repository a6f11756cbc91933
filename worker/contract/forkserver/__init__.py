"""Processes forked from a server that has imported what they need, in place of interpreters that start anew."""
