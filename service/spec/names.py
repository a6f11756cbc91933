"""Patterns of names in paths, options and job files, without the models that a job file is checked by."""

JOB_ID_PATTERN = r"^[A-Za-z0-9-]{1,40}$"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
