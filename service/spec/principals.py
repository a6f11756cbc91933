"""Principals and roles: the names of callers, and what each role may do.

Values only: no database, no HTTP. A principal's name says where it comes from: `alice` is the name of a token,
`oidc:...` comes from an identity provider, `slotline:...` from a setting. Token names hold no colon, so that none
can be taken for another kind. A role includes all roles before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ANONYMOUS = ""
"""The name of every caller of a server that asks for no token, and the owner of jobs that are older than owners."""
API_TOKEN_PRINCIPAL = "slotline:root"
"""The holder of SLOTLINE_API_TOKEN."""
METRICS_TOKEN_PRINCIPAL = "slotline:metrics"
"""The holder of SLOTLINE_METRICS_TOKEN."""


class Role(StrEnum):
    """Each role includes the roles before it; `metrics` reads the list of drivers' metrics endpoints, and nothing else."""

    METRICS = "metrics"
    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, least: Role) -> bool:
        """True where this role may do what needs at least the role `least`."""
        order = list(Role)
        return order.index(self) >= order.index(least)


@dataclass(frozen=True)
class Principal:
    """A caller, with a name and a role."""

    name: str
    role: Role

    def may_change(self, owner: str) -> bool:
        """True where this principal may cancel, retry or use what `owner` made: submitters their own, operators all."""
        return self.role.includes(Role.OPERATOR) or (
            self.role.includes(Role.SUBMITTER) and owner == self.name != ANONYMOUS
        )


OPEN_ACCESS_PRINCIPAL = Principal(ANONYMOUS, Role.ADMIN)
"""The caller of a server that asks for no token."""


def principal_text(name: str) -> str:
    """The name as messages have it; "the user" for an anonymous caller."""
    return name or "the user"
