"""Example models and data sets (GPT, U-Net, byte windows, digits), named by import path in job files and the demo.

Plain torch, numpy and scikit-learn; imports nothing of `worker`.
"""
