"""The life of an attempt: admitted, submitted, watched, its reports applied, its outcome decided and stored.

Knows decisions/, ray/ and the store; nothing here imports the scheduler.
"""
