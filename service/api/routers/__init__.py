"""Routers, one module per subject: a route is a dependency, one call, and a return.

May import service.api, service.schemas, the store and the orchestrator's public calls; nothing but the application
imports a router for its routes.
"""
