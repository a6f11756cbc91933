"""Logins of the pages at an identity provider that answers over HTTP: the whole way, and who must not come in on it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest

from service.api.oidc import IdentityProvider
from service.api.sso import own_page, single_sign_on, sso_of
from service.settings.settings import Settings
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.identity_provider import CodeProvider, code_provider
from tests.service.api.routers.test_jobs import problem
from tests.service.api.test_oidc import AUDIENCE, OTHER_RSA_KEY, ROLES
from tests.service.conftest import job_body

URL = "http://127.0.0.1:8000"
PAGE = {"Accept": "text/html,application/xhtml+xml", "Sec-Fetch-Mode": "navigate"}
OWN = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def provider() -> Iterator[CodeProvider]:
    with code_provider() as provider:
        provider.redirect_uri = f"{URL}/login/callback"
        yield provider


def settings(provider: CodeProvider, **changes: Any) -> dict[str, Any]:
    given = {"oidc_issuer": provider.url, "oidc_audience": AUDIENCE, "oidc_roles": ROLES}
    return {**given, "public_url": URL, **changes}


@pytest.fixture
async def api(make_api: ApiMaker, provider: CodeProvider) -> AsyncIterator[Api]:
    async with make_api(**settings(provider)) as api:
        yield api


def sso(api: Api) -> Any:
    return sso_of(api.client._transport.app)


async def begun(client: httpx.AsyncClient, page: str = "/") -> str:
    """Visit a page as nobody, as a browser does; the provider's address that it is led to."""
    asked = await client.get(page, headers=PAGE)
    assert asked.status_code == 303 and asked.headers["location"].startswith(f"{URL}/login?next=")
    led = await client.get(asked.headers["location"], headers=PAGE)
    assert led.status_code == 303, led.text
    return led.headers["location"]


async def confirmed(provider_address: str) -> str:
    """The address that the provider sends the browser back to."""
    async with httpx.AsyncClient() as browser:
        return (await browser.get(provider_address)).headers["location"]


async def logged_in(client: httpx.AsyncClient, page: str = "/") -> httpx.Response:
    return await client.get(await confirmed(await begun(client, page)), headers=PAGE)


async def name_of(client: httpx.AsyncClient) -> str:
    return (await client.get("/api/v1/whoami")).json().get("name", "")


@pytest.mark.parametrize("secret", [None, "s3cret"])
async def test_a_visitor_is_led_to_the_provider_and_comes_back_to_the_page_as_its_user(
    make_api: ApiMaker, provider: CodeProvider, secret: str | None
):
    provider.client_secret = secret
    async with make_api(**settings(provider, oidc_client_secret=secret)) as api:
        back = await logged_in(api.client, "/cluster?cluster=east&x=%2Fa")
        assert (back.status_code, back.headers["location"]) == (303, "/cluster?cluster=east&x=%2Fa")
        cookie = back.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=lax" in cookie and "secure" not in cookie
        assert back.headers["cache-control"] == "no-store"
        page = await api.client.get(back.headers["location"], headers=PAGE)
        assert page.status_code == 200 and 'data-user="oidc:ana"' in page.text and "Log out" in page.text
        assert (await api.client.get("/api/v1/whoami")).json() == {"name": "oidc:ana", "role": "submitter"}
        problem(await api.client.get("/api/v1/audit"), 403)


async def test_with_https_the_cookies_are_secure_and_of_this_host_alone(
    make_api: ApiMaker, provider: CodeProvider
):
    provider.redirect_uri = "https://slotline.example/login/callback"
    async with make_api(**settings(provider, public_url="https://slotline.example/")) as api:
        api.client.base_url = "https://slotline.example"
        asked = await api.client.get("/", headers=PAGE)
        assert asked.headers["location"].startswith("https://slotline.example/login?")
        led = await api.client.get(asked.headers["location"])
        back = await api.client.get(await confirmed(led.headers["location"]))
        for answer in (led, back):
            cookie = answer.headers["set-cookie"]
            assert cookie.startswith("__Host-slotline-") and "; Secure" in cookie and "Path=/" in cookie
            assert "Domain" not in cookie
        assert await name_of(api.client) == "oidc:ana"


async def test_any_replica_goes_on_with_what_another_began(
    make_api: ApiMaker, provider: CodeProvider, database_url: str
):
    shared = settings(provider, secrets_key="k" * 32, database_url=database_url)
    async with make_api(**shared, orchestrator=True) as first:
        back = await confirmed(await begun(first.client))
        cookies = dict(first.client.cookies)
    async with make_api(**shared) as second:
        second.client.cookies.update(cookies)
        assert (await second.client.get(back)).status_code == 303
        assert await name_of(second.client) == "oidc:ana"
    async with make_api(**{**shared, "secrets_key": "o" * 32}) as other:
        other.client.cookies.update(dict(second.client.cookies))
        assert await name_of(other.client) == "", "sealed with another key"


async def test_two_tabs_of_a_browser_log_in_at_the_same_time(api: Api):
    ways = [await begun(api.client, page) for page in ("/cluster", "/compare")]
    backs = [await api.client.get(await confirmed(way)) for way in ways]
    assert [back.headers["location"] for back in backs] == ["/cluster", "/compare"]


async def refused(api: Api, way: str, status: int, told: str) -> None:
    answer = await api.client.get(way, headers=PAGE)
    assert answer.status_code == status and told in answer.text, answer.text
    assert "slotline-session" not in answer.headers.get("set-cookie", "")
    assert await name_of(api.client) == ""


async def test_an_answer_that_another_browser_asked_for_logs_nobody_in(api: Api, provider: CodeProvider):
    """An attacker's answer in a victim's browser, and a victim's in an attacker's: both miss the other's cookie."""
    way = await confirmed(await begun(api.client))
    api.client.cookies.clear()
    await refused(api, way, 400, "did not begin in this browser")
    await begun(api.client)
    await refused(api, way, 400, "did not begin in this browser")
    assert "/token" not in provider.seen


@pytest.mark.parametrize("state", ["", "x", "gAAAAABinvalid"])
async def test_an_answer_with_another_state_logs_nobody_in(api: Api, provider: CodeProvider, state: str):
    way = urlsplit(await confirmed(await begun(api.client)))
    query = {name: values[0] for name, values in parse_qs(way.query).items()}
    await refused(api, f"/login/callback?{urlencode({**query, 'state': state})}", 400, "did not begin")
    session = (await logged_in(api.client)).cookies["slotline-session"]
    api.client.cookies.delete("slotline-session")
    await refused(api, f"/login/callback?{urlencode({**query, 'state': session})}", 400, "did not begin")
    forged = {"Cookie": f"slotline-session={query['state']}"}
    problem(await api.client.get("/api/v1/whoami", headers=forged), 401)


async def test_a_code_logs_in_once(api: Api):
    way = await confirmed(await begun(api.client))
    assert (await api.client.get(way)).status_code == 303
    api.client.cookies.delete("slotline-session")
    await refused(api, way, 401, "invalid_grant")


async def test_a_code_of_another_login_is_refused_by_its_challenge(api: Api):
    ways = [urlsplit(await confirmed(await begun(api.client))) for _ in range(2)]
    queries = [{name: values[0] for name, values in parse_qs(way.query).items()} for way in ways]
    mixed = {**queries[0], "code": queries[1]["code"]}
    await refused(api, f"/login/callback?{urlencode(mixed)}", 401, "invalid_grant")


@pytest.mark.parametrize(
    ("claims", "status", "told"),
    [
        ({"nonce": "another"}, 401, "nonce"),
        ({"nonce": None}, 401, "nonce"),
        ({"aud": "grafana"}, 401, "Audience"),
        ({"aud": [AUDIENCE, "grafana"], "azp": "grafana"}, 401, "made for the client"),
        ({"iss": "https://evil.example"}, 401, "issuer"),
        ({"exp": 1_000_000_000}, 401, "expired"),
        ({"key": OTHER_RSA_KEY}, 401, "Signature"),
        ({"roles": ["guests"]}, 403, "gives a role"),
        ({"sub": None}, 403, "claim sub"),
    ],
)
async def test_a_token_that_is_not_good_logs_nobody_in(
    api: Api, provider: CodeProvider, claims: dict[str, Any], status: int, told: str
):
    provider.claims = claims
    await refused(api, await confirmed(await begun(api.client)), status, told)


async def test_a_token_that_has_just_ended_is_no_reason_to_go_round_and_round(
    api: Api, provider: CodeProvider
):
    """The verifier allows clocks that are a little off; a session that has ended at its beginning would."""
    provider.claims = {"exp": int(time.time()) - 2}
    await refused(api, await confirmed(await begun(api.client)), 401, "compare this server&#39;s clock")


async def test_a_login_takes_ten_minutes_at_most(api: Api):
    way = await confirmed(await begun(api.client))
    sso(api)._now = lambda: time.time() + 601
    await refused(api, way, 400, "10 minutes")


async def test_a_refusal_of_the_provider_is_told(api: Api, provider: CodeProvider):
    provider.denies = "access_denied <b>"
    await refused(api, await confirmed(await begun(api.client)), 403, "access_denied &lt;b&gt;")
    way = await confirmed(await begun(api.client))
    await refused(api, way.replace("iss=", "iss=x"), 400, "another issuer")


@pytest.mark.parametrize(
    "place",
    [
        *(
            "https://evil.example/",
            "//evil.example",
            "/\\evil.example",
            "\\\\evil.example",
            "/\t/evil.example",
        ),
        *(
            "javascript:alert(1)",
            "evil.example",
            "",
            "/login?next=/login",
            "/logout",
            "/" + "x" * 3000,
            "/é\n",
        ),
    ],
)
async def test_a_login_ends_at_pages_of_this_server_only(api: Api, place: str):
    led = await api.client.get("/login", params={"next": place})
    back = await api.client.get(await confirmed(led.headers["location"]))
    assert back.headers["location"] == "/"


def test_pages_with_queries_and_fragments_are_gone_back_to():
    for place in ("/", "/jobs/job-1?step=3#gaps", "/compare?a=x&b=y"):
        assert own_page(place) == place


async def test_a_write_with_the_browsers_login_comes_from_an_own_page_only(api: Api):
    await logged_in(api.client)
    foreign = [
        {},
        {"Sec-Fetch-Site": "cross-site", "Origin": URL},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ]
    for headers in foreign:
        answer = await api.client.post("/api/v1/jobs", json=job_body(), headers=headers)
        assert "only a page of this server" in problem(answer, 403)["detail"]
        problem(await api.client.post("/logout", headers=headers), 403)
        problem(await api.client.post("/login/renew", headers=headers), 403)
    for headers in (OWN, {"Origin": URL}):
        answer = await api.client.post("/api/v1/jobs", json=job_body(), headers=headers)
        assert answer.status_code == 201 and answer.json()["owner"] == "oidc:ana"


async def test_a_session_ends_with_its_token_and_is_renewed_once_by_each_refresh_token(
    api: Api, provider: CodeProvider
):
    await logged_in(api.client)
    ended = api.client.cookies["slotline-session"]
    sso(api)._now = lambda: time.time() + 601
    problem(await api.client.get("/api/v1/whoami"), 401)
    provider.claims = {"exp": int(time.time()) + 1200, "roles": ["all"]}
    renewed = await api.client.post("/login/renew", headers=OWN)
    assert renewed.status_code == 204
    assert (await api.client.get("/api/v1/whoami")).json() == {"name": "oidc:ana", "role": "viewer"}
    api.client.cookies.clear()
    again = await api.client.post("/login/renew", headers={**OWN, "Cookie": f"slotline-session={ended}"})
    assert "invalid_grant" in problem(again, 401)["detail"]


async def test_a_session_is_not_renewed_as_somebody_else_nor_without_a_refresh_token(
    api: Api, provider: CodeProvider
):
    await logged_in(api.client)
    provider.claims = {"sub": "eve"}
    told = problem(await api.client.post("/login/renew", headers=OWN), 401)["detail"]
    assert "oidc:eve" in told
    provider.claims, provider.gives_refresh_tokens = {}, False
    api.client.cookies.clear()
    await logged_in(api.client)
    assert "log in again" in problem(await api.client.post("/login/renew", headers=OWN), 401)["detail"]
    api.client.cookies.clear()
    problem(await api.client.post("/login/renew", headers=OWN), 404)


async def test_logging_out_ends_the_session_and_tells_of_the_providers(api: Api, provider: CodeProvider):
    await logged_in(api.client)
    out = await api.client.post("/logout", headers=OWN)
    assert (out.status_code, out.headers["location"]) == (303, "/logout")
    assert await name_of(api.client) == ""
    page = await api.client.get("/logout", headers=PAGE)
    assert "logged out" in page.text and f"{provider.url}/end?client_id={AUDIENCE}" in page.text


async def test_programs_and_users_of_tokens_are_not_led_away(api: Api):
    answer = await api.client.get("/api/v1/jobs", headers={"Accept": "text/html"})
    assert problem(answer, 401) and answer.headers["www-authenticate"].startswith("Bearer")
    problem(await api.client.get("/"), 401)
    problem(await api.client.get("/", headers={**PAGE, "Authorization": "Bearer wrong"}), 401)
    asked = await api.client.get("/?token", headers=PAGE)
    assert problem(asked, 401) and asked.headers["www-authenticate"].startswith("Basic")


async def test_a_token_counts_for_more_than_the_browsers_login(api: Api):
    await logged_in(api.client)
    problem(await api.client.get("/api/v1/whoami", headers={"Authorization": "Bearer wrong"}), 401)


async def test_a_refresh_token_that_no_cookie_holds_is_left_out(api: Api, provider: CodeProvider):
    provider.refresh_tokens.clear()
    tokens = provider.tokens

    def long(form: dict[str, str], authorization: str | None) -> tuple[int, dict[str, Any]]:
        status, answer = tokens(form, authorization)
        return status, {**answer, "refresh_token": "r" * 5000}

    provider.tokens = long
    back = await logged_in(api.client)
    assert len(back.headers["set-cookie"]) < 4096 and await name_of(api.client) == "oidc:ana"


async def test_a_provider_that_is_away_is_told_and_asked_again(make_api: ApiMaker):
    given = {"oidc_issuer": "http://127.0.0.1:1", "oidc_audience": AUDIENCE, "oidc_roles": ROLES}
    async with make_api(**given) as api:
        answer = await api.client.get("/login", headers=PAGE)
        assert answer.status_code == 503 and "does not answer: try again" in answer.text
        assert (await api.client.get("/logout")).status_code == 200


async def test_without_a_provider_pages_ask_for_a_token(make_api: ApiMaker):
    async with make_api(api_token="secret") as api:
        asked = await api.client.get("/", headers=PAGE)
        assert problem(asked, 401) and asked.headers["www-authenticate"].startswith("Basic")
        assert "SLOTLINE_OIDC_ISSUER" in problem(await api.client.get("/login"), 404)["detail"]


def test_a_server_on_postgresql_without_a_key_says_that_its_pages_do_not_log_in(
    provider: CodeProvider, caplog: pytest.LogCaptureFixture
):
    given = Settings(**settings(provider, database_url="postgresql://user@host/name"))
    assert single_sign_on(given, IdentityProvider(given)) is None
    assert "SLOTLINE_SECRETS_KEY" in caplog.text
