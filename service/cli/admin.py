"""Commands of `slotline` for principals and operators: token, secret, project, whoami, audit, quota, notifications.

`token` works on the database that the settings name, so that the first admin token can be made before any server
runs; with --server it calls a running server's API instead. Every other command is a call of service.client.client. A
token is shown once, when it is made: the store keeps only its digest. A secret's value comes from a prompt or from
standard input, never from an argument, which would stay in the shell's history.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import re
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.markup import escape

from service.cli.output import (
    CliError,
    JobArgument,
    JsonOption,
    borderless_table,
    err,
    models_to_json,
    out,
    pattern_callback,
    print_json,
)
from service.cli.serve import settings_or_fail
from service.client.client import Client
from service.client.login import DeviceLogin, LoginError, LoginFile
from service.schemas.admin import NewToken, ProjectView, TokenView
from service.spec.names import NAME_PATTERN
from service.spec.principals import DEFAULT_PROJECT, PROJECT_ROLES, Role
from service.spec.values import VARIABLE_PATTERN

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from service.store.tables import ApiTokenRow

app = typer.Typer()


@app.command()
def notifications(job: JobArgument, as_json: JsonOption = False) -> None:
    """Webhook calls about the job's states: receivers, tries, last answers."""
    deliveries = list(Client().notifications(job))
    if as_json:
        print_json(models_to_json(deliveries))
        return
    if not deliveries:
        out.print("no notifications")
        return
    table = borderless_table()
    for title in ("job state", "receiver", "state", "tries", "last answer", "next"):
        table.add_column(title, overflow="fold")
    for delivery in deliveries:
        clock = "" if delivery.next_at is None else delivery.next_at.astimezone().strftime("%H:%M:%S")
        answer = delivery.error or ("" if delivery.status is None else str(delivery.status))
        cells = (delivery.job_state, escape(delivery.url), delivery.state, str(delivery.tries))
        table.add_row(*cells, escape(answer), clock)
    out.print(table)


@app.command()
def login(
    client_id: Annotated[
        str | None,
        typer.Option(help="The provider's client; by default the audience that the server asks for"),
    ] = None,
) -> None:
    """Log in at the server's identity provider, in any browser; commands and scripts of this user then need no token."""
    client = Client(token="")
    issuer = client.version().login
    if issuer is None:
        raise CliError(f"{client.url} has no identity provider: ask for a token, and set SLOTLINE_API_TOKEN")
    if client_id is not None:
        issuer = issuer.model_copy(update={"client_id": client_id})
    try:
        device = DeviceLogin(issuer)
        code = device.begin()
        err.print(
            f"open {code.complete_uri or code.uri} and confirm the code {code.user_code}", soft_wrap=True
        )
        LoginFile().keep(client.url, device.wait(code))
    except LoginError as error:
        raise CliError(str(error)) from None
    whoami()


@app.command()
def logout() -> None:
    """Forget the login at this server."""
    client = Client(token="")
    try:
        forgotten = LoginFile().forget(client.url)
    except LoginError as error:
        raise CliError(str(error)) from None
    print(f"logged out of {client.url}" if forgotten else f"nobody is logged in at {client.url}")


@app.command()
def whoami(as_json: JsonOption = False) -> None:
    """The name and the role of the token in SLOTLINE_API_TOKEN, or of the login."""
    me = Client().whoami()
    if as_json:
        print_json(me.model_dump(mode="json"))
    else:
        print(f"{me.name or 'nobody is asked for a name'}: {me.role}")


@app.command()
def audit(
    principal: Annotated[str | None, typer.Option(help="Only actions of this principal")] = None,
    subject: Annotated[str | None, typer.Option(help="Only actions on this job, or token")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of entries at most, the newest")] = 100,
    as_json: JsonOption = False,
) -> None:
    """The audit log, newest first; for admins."""
    entries = list(Client().audit(principal=principal, subject=subject, limit=limit))
    if as_json:
        print_json(models_to_json(entries))
        return
    for entry in entries:
        print(
            entry.at.isoformat(timespec="seconds"),
            entry.principal or "-",
            entry.action,
            entry.subject,
            entry.detail,
        )


@app.command()
def quota(
    queue: Annotated[
        str,
        typer.Argument(callback=pattern_callback(NAME_PATTERN, "a queue's name"), help="A configured queue"),
    ],
    accelerators: Annotated[
        str,
        typer.Argument(
            help="Number that its jobs may hold together; none: no quota; configured: as the settings say"
        ),
    ],
    project: Annotated[
        str | None,
        typer.Option(
            callback=pattern_callback(NAME_PATTERN, "a project's name"), help="Only jobs of this project"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Limit the accelerators that the running jobs of a queue hold together; jobs that run already continue."""
    if accelerators not in ("none", "configured") and not re.fullmatch(r"\d{1,9}", accelerators):
        raise CliError(f"{accelerators!r} is no quota: give a whole number, none, or configured")
    if project is not None and accelerators == "configured":
        raise CliError("the settings have no quotas of projects: give a whole number, or none")
    number = int(accelerators) if accelerators.isdecimal() else None
    with Client() as client:
        if project is not None:
            _print_project(client.set_project_quota(project, queue, number), as_json=as_json)
            return
        view = client.reset_quota(queue) if accelerators == "configured" else client.set_quota(queue, number)
    if as_json:
        print_json(view.model_dump(mode="json"))
        return
    shown = "no quota" if view.quota is None else f"a quota of {view.quota} accelerators"
    print(f"queue {view.name} has {shown}")


VariableNameArgument = Annotated[
    str,
    typer.Argument(
        callback=pattern_callback(VARIABLE_PATTERN, "a name of a variable"),
        help="The environment variable that holds it in jobs",
    ),
]
secrets_app = typer.Typer(help="Your own secrets, which a job names in `secrets`.", no_args_is_help=True)


@secrets_app.command("set")
def set_secret(name: VariableNameArgument, as_json: JsonOption = False) -> None:
    """Store a secret; asks for it, or reads standard input: an argument would stay in the shell's history."""
    stream = typer.get_text_stream("stdin")
    if stream.isatty():
        value = typer.prompt(f"{name}", hide_input=True, err=True)
    else:
        value = stream.read().removesuffix("\n").removesuffix("\r")
    if not value:
        raise CliError(f"no value for {name} came in: type it, or pipe it into the command")
    Client().set_secret(name, value)
    print(json.dumps({"set": name}) if as_json else f"set {name}")


@secrets_app.command("list")
def list_secrets(as_json: JsonOption = False) -> None:
    """Names of the secrets, and when each was set."""
    secrets = Client().secrets()
    if as_json:
        print_json(models_to_json(secrets))
        return
    for secret in secrets:
        print(secret.name, secret.set_at.isoformat(timespec="seconds"))


@secrets_app.command("remove")
def remove_secret(name: VariableNameArgument, as_json: JsonOption = False) -> None:
    """Delete a secret: jobs that name it end at their next attempt."""
    Client().remove_secret(name)
    print(json.dumps({"removed": name}) if as_json else f"removed {name}")


ProjectArgument = Annotated[
    str, typer.Argument(callback=pattern_callback(NAME_PATTERN, "a project's name"), help="A project")
]
projects_app = typer.Typer(help="Projects: who sees whose jobs, and with which role.", no_args_is_help=True)


@projects_app.command("list")
def list_projects(as_json: JsonOption = False) -> None:
    """Your projects, your role in each, and the number of names in its list of members."""
    projects = Client().projects()
    if as_json:
        print_json(models_to_json(projects))
        return
    table = borderless_table()
    for title in ("project", "your role", "members"):
        table.add_column(title, overflow="fold")
    for project in projects:
        members = "everybody" if project.name == DEFAULT_PROJECT else str(len(project.members))
        table.add_row(project.name, project.role, members)
    out.print(table)


@projects_app.command("show")
def show_project(project: ProjectArgument, as_json: JsonOption = False) -> None:
    """The members of a project, and its quotas."""
    _print_project(Client().project(project), as_json=as_json)


@projects_app.command("member")
def set_member(
    project: ProjectArgument,
    principal: Annotated[
        str, typer.Argument(help="A name as whoami has it, with * and ? for others: 'ci-*'")
    ],
    role: Annotated[str, typer.Argument(help="viewer, submitter or admin; none takes the name out")],
    as_json: JsonOption = False,
) -> None:
    """Give principals a role in a project, or none, for admins; the first member makes the project."""
    if role not in (*PROJECT_ROLES, "none"):
        raise CliError(f"{role!r} is no role in a project: give {', '.join(PROJECT_ROLES)}, or none")
    with Client() as client:
        if role != "none":
            _print_project(client.set_project_member(project, principal, Role(role)), as_json=as_json)
            return
        client.remove_project_member(project, principal)
    print(json.dumps({"removed": principal}) if as_json else f"removed {principal}")


def _print_project(project: ProjectView, *, as_json: bool) -> None:
    if as_json:
        print_json(project.model_dump(mode="json"))
        return
    for member in project.members:
        print(member.principal, member.role)
    for quota in project.quotas:
        print(f"queue {quota.queue}: {quota.used} of a quota of {quota.quota} accelerators used")


TokenNameArgument = Annotated[
    str,
    typer.Argument(callback=pattern_callback(NAME_PATTERN, "a name"), help="The name of the token's holder"),
]
ServerOption = Annotated[
    bool,
    typer.Option(
        "--server", help="Ask the server at SLOTLINE_URL, with an admin's token, instead of its database"
    ),
]
tokens_app = typer.Typer(help="API tokens, for SLOTLINE_REQUIRE_TOKEN=true.", no_args_is_help=True)
T = TypeVar("T")


@tokens_app.command("create")
def create_token(
    name: TokenNameArgument,
    role: Annotated[
        Role,
        typer.Option(
            help="Each role includes the ones before it; submitters cancel and retry their own jobs"
        ),
    ] = Role.SUBMITTER,
    days: Annotated[
        float | None,
        typer.Option(min=0, max=36500, help="Days for which it is valid; for ever when not given"),
    ] = None,
    server: ServerOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a token and show it, this once; the store keeps only its digest."""
    made = (
        Client().create_token(name, role=role, days=days) if server else _create_in_database(name, role, days)
    )
    print(json.dumps(made.model_dump(mode="json")) if as_json else made.token)


@tokens_app.command("list")
def list_all_tokens(server: ServerOption = False, as_json: JsonOption = False) -> None:
    """Names and roles of the tokens, when they were made and until when they are valid."""
    tokens = Client().tokens() if server else _tokens_in_database()
    if as_json:
        print(json.dumps([token.model_dump(mode="json") for token in tokens]))
        return
    for token in tokens:
        until = "it is revoked" if token.expires_at is None else token.expires_at.isoformat()
        print(token.name, token.role, token.created_at.isoformat(), f"until {until}")


@tokens_app.command("revoke")
def revoke_token(
    name: Annotated[str, typer.Argument(callback=pattern_callback(NAME_PATTERN, "a name"))],
    server: ServerOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a token invalid."""
    if server:
        Client().revoke_token(name)
    elif not _revoked_in_database(name):
        raise CliError(f"there is no token named {name}: `slotline token list` shows them")
    print(json.dumps({"revoked": name}) if as_json else f"revoked {name}")


def _tokens_in_database() -> list[TokenView]:
    from service.store.secrets import list_tokens

    return [_token_view(token) for token in asyncio.run(_in_write_session(list_tokens))]


def _revoked_in_database(name: str) -> bool:
    from service.store.database import utc_now
    from service.store.secrets import delete_token

    return asyncio.run(
        _in_write_session(lambda s: delete_token(s, name, by=_console_principal(), at=utc_now()))
    )


def _create_in_database(name: str, role: Role, days: float | None) -> NewToken:
    from sqlalchemy.exc import IntegrityError

    from service.store.database import utc_now
    from service.store.secrets import generate_token, store_token, token_digest

    token, now = generate_token(), utc_now()
    expires_at: datetime | None = None if days is None else now + timedelta(days=days)

    async def work(session: AsyncSession) -> ApiTokenRow:
        return await store_token(
            session, name, role, token_digest(token), by=_console_principal(), at=now, expires_at=expires_at
        )

    try:
        stored = asyncio.run(_in_write_session(work))
    except IntegrityError:
        raise CliError(f"there is a token named {name} already: choose another name, or revoke it") from None
    return NewToken(**_token_view(stored).model_dump(), token=token)


def _token_view(token: ApiTokenRow) -> TokenView:
    return TokenView.model_validate(token, from_attributes=True)


def _console_principal() -> str:
    """The principal of a command that works on the database itself, for the audit log."""
    try:
        return f"console:{getpass.getuser()}"[:200]
    except (KeyError, OSError):  # an account without a name, in a container
        return "console:"


async def _in_write_session(work: Callable[[AsyncSession], Awaitable[T]]) -> T:
    """Run `work` in a write session of the database that the settings name."""
    from service.store.database import Database

    database = Database(settings_or_fail().sqlalchemy_url)
    try:
        await database.start()
        async with database.write() as session:
            return await work(session)
    finally:
        await database.close()
