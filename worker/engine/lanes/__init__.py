"""Lanes of one mesh: what starts the instructions of a program, waits for them and times them, on CPU and on CUDA.

Must not know what an action does.
"""
