"""Ray as seen by the control plane: clusters, the Jobs and state HTTP API, driver logs, a local Ray.

Never imports Ray itself. Knows decisions' values; the store only to keep logs.
"""
