"""The REST API: routers of short functions, schemas, authentication, errors, web pages.

Knows the store and the orchestrator; routes never call Ray and never plan in the event loop.
"""
