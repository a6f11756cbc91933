"""One module for each way to show a plan; render.py is the door."""
