"""Who calls, and what they may do: names, roles and their order. Values only: no database, no HTTP.

A principal's name says where it comes from: `alice` is the name of a token, `oidc:...` was said by an identity
provider, `slotline:...` is a setting. Names of tokens hold no colon, so that none can be taken for another kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NOBODY = ""
"""The name of all who call a server that asks for no token; and the owner of what is older than owners."""
ROOT = "slotline:root"
"""Whoever has SLOTLINE_API_TOKEN."""
SCRAPER = "slotline:metrics"
"""Whoever has SLOTLINE_METRICS_TOKEN."""


class Role(StrEnum):
    """Each may do what those before it may; `metrics` reads where drivers serve their metrics, and nothing else."""

    METRICS = "metrics"
    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, least: Role) -> bool:
        """Whether this role may do what takes at least `least`."""
        order = list(Role)
        return order.index(self) >= order.index(least)


@dataclass(frozen=True)
class Principal:
    """Who calls, with which role."""

    name: str
    role: Role

    def may_change(self, owner: str) -> bool:
        """Whether what `owner` made is theirs to cancel, retry or use: their own, or anybody's for operators."""
        return self.role.includes(Role.OPERATOR) or (
            self.role.includes(Role.SUBMITTER) and owner == self.name != NOBODY
        )


EVERYBODY = Principal(NOBODY, Role.ADMIN)
"""The caller of a server that asks for no token."""


def by_whom(name: str) -> str:
    """The name as messages have it."""
    return name or "the user"
