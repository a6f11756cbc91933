"""The REST API: routers of short functions, schemas, authentication, errors, web pages.

Knows the store, and of the orchestrator what reads, plans and applies reports, never its rounds; routes
never plan in the event loop. schemas.py is light: service/client.py shares it.
"""
