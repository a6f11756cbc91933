"""A model's weights outside of training: where a job starts from, and the files that it leaves behind."""
