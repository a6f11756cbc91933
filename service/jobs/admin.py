"""Tokens, projects, secrets, the audit list, and the log of notifications.

A project is there as long as it has members; everybody is in the default one, which has no list of them.
Secrets are stored encrypted; no answer ever holds one, only the drivers of their owner's jobs read them.
A token is shown once: the store keeps its digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlsplit

from sqlalchemy.exc import IntegrityError

from service.jobs.clusters import check_queue_exists
from service.jobs.lifecycle import existing_job
from service.jobs.problems import ProblemError, field_problem
from service.jobs.service import Service
from service.schemas.admin import (
    AuditPage,
    AuditView,
    DeliveryPage,
    DeliveryView,
    NewToken,
    ProjectList,
    ProjectMember,
    ProjectQuotaView,
    ProjectView,
    SecretList,
    SecretView,
    TokenList,
    TokenRequest,
    TokenView,
)
from service.spec.principals import DEFAULT_PROJECT, Membership, Principal, ProjectQueue
from service.spec.values import MAX_SECRET_LENGTH, MIN_SECRET_LENGTH, checked_variable_name
from service.store.attempts import active_attempts
from service.store.database import utc_now
from service.store.events import list_audit
from service.store.notifications import deliveries_of
from service.store.queues import (
    project_members,
    project_quotas,
    remove_project_member,
    set_project_member,
    set_project_quota,
)
from service.store.secrets import (
    NoSecretsKeyError,
    SecretBox,
    delete_secret,
    delete_token,
    generate_token,
    list_secrets,
    list_tokens,
    store_secret,
    store_token,
    token_digest,
)
from service.store.tables import DeliveryRow, DeliveryState


async def read_deliveries(service: Service, job_id: str, *, skip: int, limit: int) -> DeliveryPage:
    """Notifications of the job's states, in pages; the operator's URL is not shown."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        deliveries = await deliveries_of(session, job_id, skip=skip, limit=limit + 1)
    token = str(skip + limit) if len(deliveries) > limit else None
    return DeliveryPage(
        items=[_delivery_view(delivery) for delivery in deliveries[:limit]], next_page_token=token
    )


def _delivery_view(delivery: DeliveryRow) -> DeliveryView:
    hidden = f"{urlsplit(delivery.url).scheme}://(the operator's)"
    return DeliveryView(
        id=delivery.id,
        job_id=delivery.job_id,
        event=delivery.event,
        job_state=delivery.job_state,
        url=hidden if delivery.secret is None else delivery.url,
        secret=delivery.secret,
        state=delivery.state,  # type: ignore[arg-type]
        tries=delivery.tries,
        created_at=delivery.created_at,
        next_at=delivery.next_at if delivery.state == DeliveryState.PENDING else None,
        last_at=delivery.last_at,
        status=delivery.status,
        error=delivery.error,
    )


async def read_tokens(service: Service) -> TokenList:
    """All tokens, also expired ones, without their texts."""
    async with service.database.read() as session:
        tokens = await list_tokens(session)
    return TokenList(items=[TokenView.model_validate(token, from_attributes=True) for token in tokens])


async def create_token(service: Service, wanted: TokenRequest, caller: Principal) -> NewToken:
    """A new token with its text. 409 for a name that is taken, and on a server that asks nobody for a token."""
    if not service.settings.authenticates:
        raise ProblemError(
            409,
            "this server asks nobody for a token, so anybody could make one that opens it later: "
            "set SLOTLINE_REQUIRE_TOKEN=true, or use `slotline token create` beside its database",
        )
    token, now = generate_token(), utc_now()
    expires_at = None if wanted.days is None else now + timedelta(days=wanted.days)
    try:
        async with service.database.write() as session:
            stored = await store_token(
                session,
                wanted.name,
                wanted.role,
                token_digest(token),
                by=caller.name,
                at=now,
                expires_at=expires_at,
            )
    except IntegrityError:
        raise ProblemError(
            409, f"there is a token named {wanted.name} already: choose another name, or revoke it"
        ) from None
    view = TokenView.model_validate(stored, from_attributes=True)
    return NewToken(**view.model_dump(), token=token)


async def revoke_token(service: Service, name: str, caller: Principal) -> None:
    """Make a token invalid, at once; 404 where there is none of this name."""
    async with service.database.write() as session:
        known = await delete_token(session, name, by=caller.name, at=utc_now())
    if not known:
        raise ProblemError(404, f"there is no token named {name}: GET /api/v1/tokens lists them")


async def read_projects(service: Service, caller: Principal) -> ProjectList:
    """The projects that the caller sees, with its role in each, their members and quotas."""
    async with service.database.read() as session:
        members = await project_members(session)
        quotas = await project_quotas(session)
        active = await active_attempts(session) if quotas else []
    used = Counter[ProjectQueue]()
    for attempt, job in active:
        used[ProjectQueue(job.project, job.queue)] += attempt.accelerators
    views = [
        (scope.project, ProjectQuotaView(queue=scope.queue, quota=quota, used=used[scope]))
        for scope, quota in quotas.items()
    ]
    names = dict.fromkeys(
        [DEFAULT_PROJECT, *(member.project for member in members), *(project for project, _ in views)]
    )
    return ProjectList(
        items=[
            _project_view(name, members, [quota for project, quota in views if project == name], caller)
            for name in names
            if caller.sees(name)
        ]
    )


def _project_view(
    name: str, members: Sequence[Membership], quotas: list[ProjectQuotaView], caller: Principal
) -> ProjectView:
    role = caller.role_in(name)
    assert role is not None
    own = [member for member in members if member.project == name]
    return ProjectView(
        name=name,
        role=role,
        members=[ProjectMember(principal=member.principal, role=member.role) for member in own],
        quotas=quotas,
    )


async def read_project(service: Service, name: str, caller: Principal) -> ProjectView:
    """A project with its members; 404 for one that the caller does not see."""
    projects = await read_projects(service, caller)
    for project in projects.items:
        if project.name == name:
            return project
    raise ProblemError(404, f"there is no project {name} that you are in: GET /api/v1/projects lists yours")


async def change_project_quota(
    service: Service, scope: ProjectQueue, quota: int | None, caller: Principal
) -> ProjectView:
    """Set a project's quota in a queue; None deletes it. 404 for a project without members and a queue that is not
    configured."""
    check_queue_exists(service, scope.queue)
    await read_project(service, scope.project, caller)
    async with service.database.write() as session:
        await set_project_quota(session, scope, quota, at=utc_now(), by=caller.name)
    service.wake()  # a job may start now, or be told why not
    return await read_project(service, scope.project, caller)


async def set_member(service: Service, name: str, member: ProjectMember, caller: Principal) -> ProjectView:
    """Give principals a role in a project. 422 for the default one."""
    if name == DEFAULT_PROJECT:
        raise field_problem("name", name, "everybody is in it with the role of their token: name another")
    membership = Membership(name, member.principal, member.role)
    async with service.database.write() as session:
        await set_project_member(session, membership, at=utc_now(), by=caller.name)
    return await read_project(service, name, caller)


async def remove_member(service: Service, name: str, principal: str, caller: Principal) -> None:
    """Take a name out of a project; 404 where it is not in it."""
    async with service.database.write() as session:
        known = await remove_project_member(session, name, principal, at=utc_now(), by=caller.name)
    if not known:
        message = f"project {name} has no member {principal}: GET /api/v1/projects/{name} lists them"
        raise ProblemError(404, message)


async def read_audit(
    service: Service, *, principal: str | None, subject: str | None, before: int | None, limit: int
) -> AuditPage:
    """Audit entries numbered below `before`, newest first; of one principal or subject, or of all."""
    async with service.database.read() as session:
        entries = await list_audit(
            session, principal=principal, subject=subject, before=before, limit=limit + 1
        )
    token = str(entries[limit - 1].number) if len(entries) > limit else None
    views = [AuditView.model_validate(entry, from_attributes=True) for entry in entries[:limit]]
    return AuditPage(items=views, next_page_token=token)


async def read_secrets(service: Service, caller: Principal) -> SecretList:
    """The names of the caller's secrets, and when each was set."""
    async with service.database.read() as session:
        secrets = await list_secrets(session, caller.name)
    return SecretList(items=[SecretView.model_validate(secret, from_attributes=True) for secret in secrets])


async def write_secret(service: Service, name: str, value: bytes, caller: Principal) -> None:
    """Encrypt and store a secret of the caller's: text in UTF-8, long enough to be hidden in logs.

    409 without a key to encrypt it, 413 for a long one, 422 for a value or a name that no variable can have.
    """
    try:
        checked_variable_name(name)
    except ValueError as error:
        raise ProblemError(422, str(error)) from None
    if len(value) > MAX_SECRET_LENGTH:
        raise ProblemError(413, f"the secret is longer than {MAX_SECRET_LENGTH} bytes: put it into a file")
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise ProblemError(422, "the secret is not text in UTF-8: encode it, e.g. in base64") from None
    if len(text.strip()) < MIN_SECRET_LENGTH or "\0" in text:
        raise ProblemError(
            422,
            f"a secret has at least {MIN_SECRET_LENGTH} characters, none of them NUL, so that it can be kept out of "
            "logs: what is no secret belongs into the job's env",
        )
    try:
        sealed = SecretBox.of(service.settings).seal(caller.name, name, text)
    except NoSecretsKeyError as error:
        raise ProblemError(409, str(error)) from None
    async with service.database.write() as session:
        await store_secret(session, caller.name, name, sealed, at=utc_now())


async def remove_secret(service: Service, name: str, caller: Principal) -> None:
    """Delete a secret of the caller's; 404 where there is none of this name."""
    async with service.database.write() as session:
        known = await delete_secret(session, caller.name, name, at=utc_now())
    if not known:
        raise ProblemError(404, f"you have no secret {name}: GET /api/v1/secrets lists them")
