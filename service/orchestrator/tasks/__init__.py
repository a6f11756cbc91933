"""One-shot Ray tasks: profile a job, export weights, delete artifacts, over one runner that all replicas share."""
