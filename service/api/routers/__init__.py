"""Routers, one module per subject: a route is a dependency, one call, and a return; the rules are in service.jobs.

May import service.api, service.schemas, service.jobs and lists of the store; only the application imports a router.
"""

from service.api.routers import activity, admin, artifacts, clusters, drivers, jobs, plans, system

USER_ROUTERS = (
    plans.job_plan_router,
    jobs.router,
    activity.router,
    admin.notifications_router,
    clusters.quotas_router,
    plans.spec_plan_router,
    plans.saved_plans_router,
    artifacts.packages_router,
    clusters.clusters_router,
    admin.people_router,
    admin.projects_router,
    admin.secrets_router,
    activity.why_router,
    activity.postmortem_router,
    artifacts.weights_router,
    artifacts.artifacts_router,
    artifacts.usage_router,
)
"""Users send a token; the order is the order of the API's documentation."""
OTHER_ROUTERS = (drivers.router, system.router)
"""Drivers send the token of their attempt; probes and scrapers need none."""
__all__ = ["OTHER_ROUTERS", "USER_ROUTERS"]
