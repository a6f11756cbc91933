"""Request and response bodies of the REST API as pydantic models, shared by server, client and CLI.

Import service.spec and worker.contract only: no web framework, no database, no Ray. Field names are the wire format.
"""
