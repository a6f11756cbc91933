"""The typed REST client: `from service.client import Client`.

May import service.schemas and service.spec; must not import the server, the store, or anything that workers need.
"""

from service.client.client import ApiError, Client, ClientError, UnreachableError

__all__ = ["ApiError", "Client", "ClientError", "UnreachableError"]
