"""Trackers of a job (`tracking`): TensorBoard, Weights & Biases, MLflow or an object of the user's, beside training.

`trackers` knows the libraries, `run_tracking` the values of a run and how they get there without being waited for.
"""
