"""Logins by a device code: a provider that answers as RFC 8628 says, and the file in which tokens are kept."""

from __future__ import annotations

import base64
import json
import stat
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from service.client.client import Client, ClientError
from service.client.login import DeviceLogin, Login, LoginAuth, LoginError, LoginFile, renew
from service.schemas.system import LoginIssuer

ISSUER = LoginIssuer(issuer="https://id.example/realm", client_id="slotline")
SERVER = "https://slotline.example"


def jwt(expires_at: float, **claims: Any) -> str:
    """A token of this form; nobody verifies it here."""
    parts = ({"alg": "RS256"}, {"exp": expires_at, **claims})
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join((*encoded, "signature"))


class Provider:
    """Answers the calls of a login; `token_answers` are those of the token endpoint, in order: (status, body)."""

    def __init__(self, *token_answers: tuple[int, dict[str, Any]], **document: Any):
        self.token_answers, self.asked = list(token_answers), []
        base = ISSUER.issuer
        self.document = {
            "issuer": base,
            "token_endpoint": f"{base}/token",
            "device_authorization_endpoint": f"{base}/device",
            **document,
        }
        self.code = {
            "device_code": "d-1",
            "user_code": "WDJB-MJHT",
            "verification_uri": f"{base}/activate",
            "interval": 3,
            "expires_in": 60,
        }

    def answer(self, request: httpx.Request) -> httpx.Response:
        form = {name: values[0] for name, values in parse_qs(request.content.decode()).items()}
        self.asked.append((request.method, request.url.path, form))
        if request.url.path.endswith("/openid-configuration"):
            return httpx.Response(200, json=self.document)
        if request.url.path.endswith("/device"):
            return httpx.Response(200, json=self.code)
        status, body = self.token_answers.pop(0)
        return httpx.Response(status, json=body)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self.answer))


class Clock:
    """Seconds that go on only while somebody sleeps."""

    def __init__(self):
        self.at_s, self.slept = 50.0, []

    def now(self) -> float:
        return self.at_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at_s += seconds


def device(provider: Provider, clock: Clock) -> DeviceLogin:
    return DeviceLogin(ISSUER, http=provider.http, clock=clock.now, sleep=clock.sleep)


PENDING, SLOWER = (400, {"error": "authorization_pending"}), (400, {"error": "slow_down"})


def test_a_login_waits_as_long_as_the_provider_says_and_takes_the_id_token():
    token = jwt(2e9, aud="slotline")
    granted = {"id_token": token, "access_token": "opaque", "refresh_token": "r-1"}
    provider, clock = Provider(PENDING, SLOWER, PENDING, (200, granted)), Clock()
    login = device(provider, clock)
    code = login.begin()
    assert (code.user_code, code.uri, code.complete_uri) == ("WDJB-MJHT", f"{ISSUER.issuer}/activate", None)
    found = login.wait(code)
    assert found == Login(token, 2e9, "r-1", f"{ISSUER.issuer}/token", "slotline")
    assert clock.slept == [3.0, 3.0, 8.0, 8.0], "RFC 8628: slow_down adds five seconds"
    _, begun, *polls = provider.asked
    assert begun[2] == {"client_id": "slotline", "scope": "openid offline_access"}
    assert polls[0] == (
        "POST",
        "/realm/token",
        {
            "grant_type": "urn:ietf:params:oauth:grant-type:device_code",
            "device_code": "d-1",
            "client_id": "slotline",
        },
    )


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([(400, {"error": "access_denied"})], "refused in the browser"),
        ([PENDING, (400, {"error": "expired_token"})], "not confirmed in time"),
        ([PENDING] * 99, "not confirmed in time"),
        (
            [(401, {"error": "invalid_client", "error_description": "no such client"})],
            r"invalid_client \(no such",
        ),
        ([(200, {"refresh_token": "r"})], "gave no token"),
    ],
)
def test_a_login_that_comes_to_nothing_says_why_and_ends(answers, told):
    clock = Clock()
    login = device(Provider(*answers), clock)
    with pytest.raises(LoginError, match=told):
        login.wait(login.begin())
    assert clock.at_s <= 50.0 + 60.0 + 3.0


@pytest.mark.parametrize(("failures", "succeeds"), [(3, True), (4, False)])
def test_a_provider_that_is_away_for_a_moment_is_asked_again(failures, succeeds):
    """Errors in a row end it; one that is pending again begins the count anew."""
    provider, away = Provider(PENDING, PENDING, (200, {"id_token": jwt(2e9)})), [0, *[1] * failures, 0]
    answer = provider.answer

    def unsteady(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/token") and away and away.pop(0):
            return httpx.Response(502, text="bad gateway")
        return answer(request)

    provider.answer = unsteady
    login = device(provider, Clock())
    code = login.begin()
    if succeeds:
        assert login.wait(code).expires_at == 2e9
    else:
        with pytest.raises(LoginError, match="answered 502"):
            login.wait(code)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"issuer": "https://other.example"}, "of the issuer 'https://other.example', and the server trusts"),
        ({"device_authorization_endpoint": None}, "offers no device_authorization_endpoint"),
        ({"token_endpoint": "http://id.example/token"}, "token_endpoint .* which is no https address"),
    ],
)
def test_a_provider_that_is_another_or_has_no_device_flow_is_refused(document, told):
    with pytest.raises(LoginError, match=told):
        device(Provider(**document), Clock())


def test_a_provider_that_does_not_answer_is_named():
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route to host")

    with pytest.raises(LoginError, match=r"https://id.example/realm/.well-known.* does not answer: no route"):
        DeviceLogin(ISSUER, http=httpx.Client(transport=httpx.MockTransport(away)))
    html = httpx.MockTransport(lambda request: httpx.Response(502, text="<html>"))
    with pytest.raises(LoginError, match="answered 502 without a JSON object"):
        DeviceLogin(ISSUER, http=httpx.Client(transport=html))


def kept(expires_at: float, refresh: str | None = "r-1") -> Login:
    return Login(jwt(expires_at), expires_at, refresh, f"{ISSUER.issuer}/token", "slotline")


def test_an_expired_token_is_renewed_and_the_refresh_token_stays_where_none_comes():
    fresh = jwt(9e9)
    provider = Provider((200, {"id_token": fresh}))
    assert renew(kept(10.0), http=provider.http) == Login(
        fresh, 9e9, "r-1", f"{ISSUER.issuer}/token", "slotline"
    )
    (_, _, form) = provider.asked[0]
    assert form == {"grant_type": "refresh_token", "refresh_token": "r-1", "client_id": "slotline"}
    with pytest.raises(LoginError, match=r"expired \(invalid_grant\): run slotline login"):
        renew(kept(10.0), http=Provider((400, {"error": "invalid_grant"})).http)
    with pytest.raises(LoginError, match="has expired: run slotline login"):
        renew(kept(10.0, refresh=None))


def test_logins_are_kept_by_server_where_nobody_else_reads(tmp_path):
    file = LoginFile(tmp_path / "deep" / "logins.json")
    assert file.find(SERVER) is None and not file.forget(SERVER)
    file.keep(SERVER, kept(7.0))
    file.keep("http://other", kept(8.0))
    assert file.find(SERVER) == kept(7.0)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert file.forget(SERVER) and file.find(SERVER) is None and file.find("http://other") == kept(8.0)
    assert [one.name for one in file.path.parent.iterdir()] == ["logins.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"https://slotline.example": {"tok": 1}}'])
def test_a_file_that_is_no_file_of_logins_is_named_with_the_way_out(tmp_path, monkeypatch, text):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SLOTLINE_API_TOKEN", raising=False)
    path = tmp_path / "slotline" / "logins.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ClientError, match=r"logins.json cannot be read .*remove it, and run slotline login"):
        Client(SERVER)
    Client(SERVER, token="mine").close()


def sent(auth: LoginAuth) -> str:
    """The token that a request gets."""
    request = httpx.Request("GET", SERVER)
    next(auth.auth_flow(request))
    return request.headers["Authorization"]


def test_each_request_has_a_token_that_is_good_whoever_renewed_it(tmp_path, monkeypatch):
    now, file = [1000.0], LoginFile(tmp_path / "logins.json")
    old, other, own = kept(2000.0), kept(4000.0), kept(8000.0)
    auth = LoginAuth(SERVER, file, old, now=lambda: now[0])
    assert sent(auth) == f"Bearer {old.token}"
    now[0] = 1950.0  # less than a minute is left
    file.keep(SERVER, other)  # by another command
    monkeypatch.setattr("service.client.login.renew", lambda login: pytest.fail("it was renewed already"))
    assert sent(auth) == f"Bearer {other.token}"
    now[0] = 5000.0
    renewed = []
    monkeypatch.setattr("service.client.login.renew", lambda login: renewed.append(login) or own)
    assert sent(auth) == f"Bearer {own.token}" and file.find(SERVER) == own
    assert renewed == [other], "by the newest refresh token: an older one may be good no more"


def test_of_two_commands_that_renew_at_once_the_later_takes_what_the_other_got(tmp_path, monkeypatch):
    file, fresh = LoginFile(tmp_path / "logins.json"), kept(8000.0)
    file.keep(SERVER, kept(2000.0))

    def renew_late(login: Login) -> Login:
        file.keep(SERVER, fresh)
        raise LoginError("invalid_grant")

    monkeypatch.setattr("service.client.login.renew", renew_late)
    assert sent(LoginAuth(SERVER, file, kept(2000.0), now=lambda: 5000.0)) == f"Bearer {fresh.token}"
    with pytest.raises(LoginError, match="invalid_grant"):
        sent(LoginAuth(SERVER, file, kept(2000.0), now=lambda: 9000.0))


def test_a_token_goes_to_its_own_server_alone_and_a_given_one_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SLOTLINE_API_TOKEN", raising=False)
    LoginFile().keep(SERVER, kept(9e9))
    assert isinstance(Client(SERVER)._http.auth, LoginAuth)
    assert isinstance(Client(f"{SERVER}/")._http.auth, LoginAuth)
    assert Client("https://elsewhere.example")._http.auth is None
    assert Client(SERVER, token="")._http.auth is None
    monkeypatch.setenv("SLOTLINE_API_TOKEN", "mine")
    client = Client(SERVER)
    assert client._http.auth is None and client._http.headers["Authorization"] == "Bearer mine"
