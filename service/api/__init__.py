"""The REST API: authentication, errors, middleware, OpenAPI, routers and web pages.

Knows the store, and of the orchestrator what reads, plans and applies reports, never its rounds.
Must not import service.control_plane; routes never plan in the event loop.
"""
