"""One-shot Ray tasks: check or profile a job, export weights, delete artifacts, over one runner that all replicas share."""
