"""The REST API: authentication, errors, middleware, routers and web pages over the rules of service.jobs.

Must not import service.control_plane, nor the orchestrator's rounds; routes never plan in the event loop.
"""
