"""Layers to stages: what a cut costs, and cuts that look best before anything is scheduled."""
