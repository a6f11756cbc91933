"""The store: SQLAlchemy tables and one module of queries for each concern (jobs, attempts, leases, measurements, ...).

Knows SQL, service.spec and service.settings.settings; never Ray, HTTP, the orchestrator or the scheduler. No network call
inside a session.
"""
