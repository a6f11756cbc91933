"""The least role of every route, in one table. A route that is not in it is for admins; a test finds it."""

from __future__ import annotations

from service.principals import Role

_VIEWERS = (
    ("GET", "/"),
    ("GET", "/cluster"),
    ("GET", "/jobs/{job_id}"),
    ("GET", "/jobs/{job_id}/choice"),
    ("GET", "/jobs/{job_id}/gaps"),
    ("GET", "/jobs/{job_id}/memory"),
    ("GET", "/jobs/{job_id}/profiled-steps"),
    ("GET", "/static/{name}"),
    ("GET", "/api/v1/cluster"),
    ("GET", "/api/v1/jobs"),
    ("GET", "/api/v1/jobs/{job_id}"),
    ("GET", "/api/v1/jobs/{job_id}/artifacts"),
    ("GET", "/api/v1/jobs/{job_id}/checkpoints"),
    ("GET", "/api/v1/jobs/{job_id}/evaluations"),
    ("GET", "/api/v1/jobs/{job_id}/events"),
    ("GET", "/api/v1/jobs/{job_id}/logs"),
    ("GET", "/api/v1/jobs/{job_id}/notifications"),
    ("GET", "/api/v1/jobs/{job_id}/plan"),
    ("GET", "/api/v1/jobs/{job_id}/postmortem"),
    ("GET", "/api/v1/jobs/{job_id}/steps"),
    ("GET", "/api/v1/jobs/{job_id}/timeline"),
    ("GET", "/api/v1/jobs/{job_id}/why"),
    ("GET", "/api/v1/plans/named"),
    ("GET", "/api/v1/plans/named/{name}"),
    ("GET", "/api/v1/queues"),
    ("GET", "/api/v1/usage"),
    ("GET", "/api/v1/whoami"),
)
_SUBMITTERS = (
    ("POST", "/api/v1/jobs"),
    ("PATCH", "/api/v1/jobs/{job_id}"),  # their own, as the next ones
    ("POST", "/api/v1/jobs/{job_id}/cancel"),  # their own; operators those of all
    ("POST", "/api/v1/jobs/{job_id}/export"),  # it runs on the cluster
    ("POST", "/api/v1/jobs/{job_id}/retry"),
    ("DELETE", "/api/v1/jobs/{job_id}/checkpoints/{step}"),
    ("DELETE", "/api/v1/jobs/{job_id}/exports/{name}"),
    ("POST", "/api/v1/packages"),
    ("POST", "/api/v1/plans"),  # it computes
    ("POST", "/api/v1/plans/job"),  # it runs the job's code
    ("DELETE", "/api/v1/plans/named/{name}"),  # their own; operators those of all
    ("GET", "/api/v1/secrets"),  # their own, as all of these
    ("PUT", "/api/v1/secrets/{name}"),
    ("DELETE", "/api/v1/secrets/{name}"),
)
_OPERATORS = (
    ("PUT", "/api/v1/queues/{name}/quota"),
    ("DELETE", "/api/v1/queues/{name}/quota"),
)
_ADMINS = (
    ("GET", "/api/v1/audit"),
    ("GET", "/api/v1/tokens"),
    ("POST", "/api/v1/tokens"),
    ("DELETE", "/api/v1/tokens/{name}"),
)
LEAST_ROLE: dict[tuple[str, str], Role] = {
    ("GET", "/api/v1/prometheus/targets"): Role.METRICS,
    **dict.fromkeys(_VIEWERS, Role.VIEWER),
    **dict.fromkeys(_SUBMITTERS, Role.SUBMITTER),
    **dict.fromkeys(_OPERATORS, Role.OPERATOR),
    **dict.fromkeys(_ADMINS, Role.ADMIN),
}


def least_role(method: str, path: str) -> Role:
    """What a caller of the route with this template of a path must at least be."""
    return LEAST_ROLE.get(("GET" if method == "HEAD" else method, path), Role.ADMIN)
