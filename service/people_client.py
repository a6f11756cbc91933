"""The calls of service.client.Client about people: tokens, secrets, who did what. A part of it, of no use alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from service.api.people_schemas import (
    AuditPage,
    AuditView,
    NewToken,
    SecretList,
    SecretView,
    TokenList,
    TokenView,
    Whoami,
)
from service.principals import Role

_PAGE = 500


class PeopleCalls:
    """Calls of a Client, which says how a call is made."""

    _get: Callable[..., Any]
    _post: Callable[..., Any]
    _call: Callable[..., Any]

    def whoami(self) -> Whoami:
        """The name and the role of this client's token."""
        return self._get(Whoami, "/api/v1/whoami")

    def create_token(self, name: str, *, role: Role = Role.SUBMITTER, days: float | None = None) -> NewToken:
        """Make a token, for admins; only this answer has it."""
        body = {"name": name, "role": role, "days": days}
        return self._post(NewToken, "/api/v1/tokens", json=body)

    def tokens(self) -> list[TokenView]:
        """All tokens without what opens anything, for admins."""
        return self._get(TokenList, "/api/v1/tokens").items

    def revoke_token(self, name: str) -> None:
        """Make a token invalid, for admins."""
        self._call("DELETE", f"/api/v1/tokens/{name}")

    def set_secret(self, name: str, value: str) -> None:
        """Keep a secret of one's own: a job that names it in `secrets` finds it in its environment."""
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        self._call("PUT", f"/api/v1/secrets/{name}", content=value.encode(), headers=headers)

    def secrets(self) -> list[SecretView]:
        """The names of one's own secrets."""
        return self._get(SecretList, "/api/v1/secrets").items

    def remove_secret(self, name: str) -> None:
        self._call("DELETE", f"/api/v1/secrets/{name}")

    def audit(
        self, *, principal: str | None = None, subject: str | None = None, limit: int | None = None
    ) -> Iterator[AuditView]:
        """Who did what, newest first, at most `limit`, for admins."""
        left, token = limit, None
        while left is None or left > 0:
            size = _PAGE if left is None else min(left, _PAGE)
            page = self._get(
                AuditPage,
                "/api/v1/audit",
                principal=principal,
                subject=subject,
                limit=size,
                page_token=token,
            )
            yield from page.items
            left = None if left is None else left - len(page.items)
            if (token := page.next_page_token) is None:
                return
