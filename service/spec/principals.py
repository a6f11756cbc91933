"""Principals, roles and projects: the names of callers, and what each role may do, and where.

Values only: no database, no HTTP. A principal's name says where it comes from: `alice` is the name of a token,
`oidc:...` comes from an identity provider, `slotline:...` from a setting. Token names hold no colon, so that none
can be taken for another kind. A role includes all roles before it. A project is a name that jobs and saved plans have:
the role of a token says which routes its holder may call, a role in a project on whose jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import NamedTuple

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


DEFAULT_PROJECT = "default"
"""The project of jobs that name none: everybody is in it, with the role of their token."""
PROJECT_ROLES = (Role.VIEWER, Role.SUBMITTER, Role.ADMIN)


class ProjectQueue(NamedTuple):
    """A project in a queue, whose running jobs may have a quota of accelerators together, as those of a queue may."""

    project: str
    queue: str


QuotaScope = str | ProjectQueue
"""What a quota is of: a queue by its name, or a project in a queue."""


def quota_scopes(project: str, queue: str) -> tuple[ProjectQueue, str]:
    """The scopes whose quotas bound a job, the smaller first."""
    return ProjectQueue(project, queue), queue


@dataclass(frozen=True)
class Membership:
    """Principals with this name, in which * and ? stand for others, have this role in the project."""

    project: str
    principal: str
    role: Role

    def applies_to(self, name: str) -> bool:
        return name == self.principal or fnmatchcase(name, self.principal)


def roles_of(name: str, memberships: Iterable[Membership]) -> dict[str, Role]:
    """The highest role that memberships give a principal, by project."""
    roles = dict[str, Role]()
    for membership in memberships:
        project, role = membership.project, membership.role
        if membership.applies_to(name) and role.includes(roles.get(project, Role.METRICS)):
            roles[project] = role
    return roles


@dataclass(frozen=True)
class Principal:
    """A caller, with a name, the role of its token, and its roles in projects beside the default one."""

    name: str
    role: Role
    projects: Mapping[str, Role] = field(default_factory=dict)

    @property
    def visible_projects(self) -> frozenset[str] | None:
        """The projects whose jobs and plans this principal sees; None: all, as operators do."""
        if self.role.includes(Role.OPERATOR):
            return None
        return frozenset({DEFAULT_PROJECT, *self.projects})

    def role_in(self, project: str) -> Role | None:
        """The role in a project; None: this principal sees nothing of it."""
        if self.role.includes(Role.OPERATOR) or project == DEFAULT_PROJECT:
            return self.role
        return self.projects.get(project)

    def sees(self, project: str) -> bool:
        return self.role_in(project) is not None

    def may_change(self, owner: str, project: str) -> bool:
        """True where this principal may cancel, retry or use what `owner` made: submitters their own, operators all, and
        admins of a project all that is in it."""
        role = self.role_in(project)
        if role is None or not self.role.includes(Role.SUBMITTER):
            return False
        return role.includes(Role.OPERATOR) or (
            role.includes(Role.SUBMITTER) and owner == self.name != ANONYMOUS
        )

    def why_not(self, owner: str, project: str) -> str:
        """The words behind "is" in a refusal to change what `owner` made in a project, whose end is "ask one"."""
        if owner == self.name != ANONYMOUS:
            return f"yours, and you are {self.role_in(project)} in project {project}, which admins of Slotline may change"
        possessive = f"{owner}'s" if owner else "nobody's that is known"
        place = "" if project == DEFAULT_PROJECT else f", and no admin of project {project}"
        return f"{possessive}, and {self.name} is no operator{place}"


OPEN_ACCESS_PRINCIPAL = Principal(ANONYMOUS, Role.ADMIN)
"""The caller of a server that asks for no token."""


def principal_text(name: str) -> str:
    """The name as messages have it; "the user" for an anonymous caller."""
    return name or "the user"
