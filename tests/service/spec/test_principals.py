"""Roles of principals in projects: by name and by pattern, the highest one; what a role lets them see and change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.spec.principals import (
    OPEN_ACCESS_PRINCIPAL,
    PROJECT_ROLES,
    Membership,
    Principal,
    Role,
    roles_of,
)

RANK = {Role.VIEWER: 1, Role.SUBMITTER: 2, Role.ADMIN: 3}
NAMES = ["alice", "alan", "bob", "oidc:a|1@nlp.example", "oidc:b@nlp.example", "x[1]"]
FITTING = {
    "alice": {"alice"},
    "al*": {"alice", "alan"},
    "*": set(NAMES),
    "b?b": {"bob"},
    "oidc:*@nlp.example": {"oidc:a|1@nlp.example", "oidc:b@nlp.example"},
    "x[1]": {"x[1]"},
    "ALICE": set(),
}
"""The names that each pattern fits, by hand."""
MEMBERSHIPS = st.builds(
    Membership,
    st.sampled_from(["nlp", "vision"]),
    st.sampled_from(sorted(FITTING)),
    st.sampled_from(PROJECT_ROLES),
)


@given(st.sampled_from(NAMES), st.lists(MEMBERSHIPS, max_size=8))
def test_a_principal_has_the_highest_role_of_the_patterns_that_fit_its_name(
    name: str, members: list[Membership]
):
    expected: dict[str, Role] = {}
    for project in ("nlp", "vision"):
        roles = [m.role for m in members if m.project == project and name in FITTING[m.principal]]
        if roles:
            expected[project] = sorted(roles, key=RANK.__getitem__)[-1]
    assert roles_of(name, members) == expected


@pytest.mark.parametrize(
    ("role", "in_project", "own", "others"),
    [
        (Role.VIEWER, Role.ADMIN, False, False),
        (Role.SUBMITTER, None, False, False),
        (Role.SUBMITTER, Role.VIEWER, False, False),
        (Role.SUBMITTER, Role.SUBMITTER, True, False),
        (Role.SUBMITTER, Role.ADMIN, True, True),
        (Role.OPERATOR, None, True, True),
        (Role.ADMIN, Role.VIEWER, True, True),
    ],
)
def test_who_may_change_what_in_a_project(role: Role, in_project: Role | None, own: bool, others: bool):
    caller = Principal("alice", role, {} if in_project is None else {"nlp": in_project})
    assert (caller.may_change("alice", "nlp"), caller.may_change("bob", "nlp")) == (own, others)
    assert caller.sees("nlp") == (in_project is not None or role in (Role.OPERATOR, Role.ADMIN))
    default = Principal("alice", role).may_change("bob", "default")
    assert caller.may_change("bob", "default") == default == (role in (Role.OPERATOR, Role.ADMIN))


def test_operators_and_who_needs_no_token_see_every_project_others_theirs_and_the_default_one():
    assert Principal("olga", Role.OPERATOR).visible_projects is None
    assert OPEN_ACCESS_PRINCIPAL.visible_projects is None
    assert Principal("alice", Role.VIEWER, {"nlp": Role.ADMIN}).visible_projects == {"default", "nlp"}
