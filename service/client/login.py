"""Logs a user in at the identity provider of a server, without a browser here, and keeps the tokens for its client.

OAuth 2.0 device authorization grant (RFC 8628) with the endpoints that OpenID Connect discovery names. The user opens an
address in any browser and types a code, while this process asks until the provider gives tokens. They lie in a file that
only the user may read, by the server's address, and go to no other server; an expired one is renewed by its refresh token.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from service.schemas.system import LoginIssuer

_DISCOVERY_PATH = "/.well-known/openid-configuration"
_DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_SCOPE = "openid offline_access"
_CALL_LIMIT_S = 30.0
_INTERVAL_S, _SLOWER_BY_S = 5.0, 5.0  # RFC 8628, sections 3.2 and 3.5
_CODE_LIFE_S = 1800.0
_FAILURES = 4  # questions in a row without an answer that end a login
_RENEW_BEFORE_S = 60.0
_ANSWER_LIMIT_BYTES = 1 << 20


class LoginError(Exception):
    """Nobody is logged in; the message says why, and what to do."""


@dataclass(frozen=True)
class DeviceCode:
    """A code that the user confirms at an address; `complete_uri` has the code in it where the provider gives that."""

    device_code: str
    user_code: str
    uri: str
    complete_uri: str | None
    interval_s: float
    expires_s: float


@dataclass(frozen=True)
class Login:
    """The tokens of one server's user: `token` is what the server gets, until `expires_at` (Unix seconds; None: unknown)."""

    token: str
    expires_at: float | None
    refresh_token: str | None
    token_endpoint: str
    client_id: str

    def is_due(self, now: float) -> bool:
        """True where the token has expired, or will in a moment."""
        return self.expires_at is not None and now > self.expires_at - _RENEW_BEFORE_S


class DeviceLogin:
    """One login at `issuer`; `http` is a client of httpx, `clock` and `sleep` are time's unless a test brings its own."""

    def __init__(
        self,
        issuer: LoginIssuer,
        *,
        http: httpx.Client | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._issuer, self._clock, self._sleep = issuer, clock, sleep
        self._http = http or httpx.Client(timeout=_CALL_LIMIT_S)
        base = issuer.issuer.rstrip("/")
        answer = _ask(self._http, "GET", base + _DISCOVERY_PATH)
        if answer.get("issuer") != issuer.issuer:
            raise LoginError(
                f"{base}{_DISCOVERY_PATH} is of the issuer {answer.get('issuer')!r}, and the server trusts {issuer.issuer!r}"
            )
        self._token_endpoint = _endpoint(answer, "token_endpoint", base)
        self._device_endpoint = _endpoint(answer, "device_authorization_endpoint", base)

    def begin(self) -> DeviceCode:
        """Ask for a code that the user can confirm."""
        data = {"client_id": self._issuer.client_id, "scope": _SCOPE}
        answer = _ask(self._http, "POST", self._device_endpoint, data)
        try:
            return DeviceCode(
                device_code=str(answer["device_code"]),
                user_code=str(answer["user_code"]),
                uri=str(answer["verification_uri"]),
                complete_uri=answer.get("verification_uri_complete"),
                interval_s=float(answer.get("interval", _INTERVAL_S)),
                expires_s=float(answer.get("expires_in", _CODE_LIFE_S)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LoginError(f"{self._device_endpoint} gave no code ({error!r})") from None

    def wait(self, code: DeviceCode) -> Login:
        """Ask until the user has confirmed the code. Raises LoginError where that was refused, or the code is too old."""
        data = {
            "grant_type": _DEVICE_GRANT,
            "device_code": code.device_code,
            "client_id": self._issuer.client_id,
        }
        interval_s, until, failures = code.interval_s, self._clock() + code.expires_s, 0
        while self._clock() < until:
            self._sleep(interval_s)
            try:
                answer = _ask(self._http, "POST", self._token_endpoint, data)
            except _OAuthError as error:
                if error.code == "slow_down":
                    interval_s += _SLOWER_BY_S
                elif error.code == "access_denied":
                    raise LoginError("the login was refused in the browser") from None
                elif error.code == "expired_token":
                    break
                elif error.code != "authorization_pending":
                    raise LoginError(str(error)) from None
                failures = 0
            except LoginError:  # a provider that is away for a moment
                failures += 1
                if failures == _FAILURES:
                    raise
            else:
                return _login_of(answer, self._token_endpoint, self._issuer.client_id)
        raise LoginError("the code was not confirmed in time: run slotline login again")


def renew(login: Login, *, http: httpx.Client | None = None) -> Login:
    """The login with a new token, by its refresh token. Raises LoginError where the provider gives none any more."""
    again = "run slotline login"
    if login.refresh_token is None:
        raise LoginError(f"the login has expired: {again}")
    data = {
        "grant_type": "refresh_token",
        "refresh_token": login.refresh_token,
        "client_id": login.client_id,
    }
    with contextlib.ExitStack() as owned:
        client = http or owned.enter_context(httpx.Client(timeout=_CALL_LIMIT_S))
        try:
            answer = _ask(client, "POST", login.token_endpoint, data)
        except _OAuthError as error:
            raise LoginError(f"the login has expired ({error.code}): {again}") from None
    renewed = {"refresh_token": login.refresh_token, **answer}  # where it gives no new one the old one stays
    return _login_of(renewed, login.token_endpoint, login.client_id)


class LoginFile:
    """The logins of a user by the addresses of servers, in a file that nobody else may read."""

    def __init__(self, path: Path | None = None) -> None:
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        self.path = path or home / "slotline" / "logins.json"

    def find(self, url: str) -> Login | None:
        """The login at this server; None where there is none."""
        entry = self._read().get(url)
        return None if entry is None else Login(**entry)

    def keep(self, url: str, login: Login) -> None:
        """Store a login in place of that server's last one."""
        self._write({**self._read(), url: asdict(login)})

    def forget(self, url: str) -> bool:
        """Remove the login at this server; False where there is none."""
        logins = self._read()
        if logins.pop(url, None) is None:
            return False
        self._write(logins)
        return True

    def _read(self) -> dict[str, Any]:
        try:
            logins = json.loads(self.path.read_text())
            for entry in logins.values():
                Login(**entry)
            return dict(logins)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise LoginError(
                f"{self.path} cannot be read ({error}): remove it, and run slotline login"
            ) from None

    def _write(self, logins: Mapping[str, Any]) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.path.parent)  # for this user alone
            with os.fdopen(descriptor, "w") as file:
                json.dump(logins, file)
            os.replace(name, self.path)
        except OSError as error:
            raise LoginError(f"{self.path} cannot be written: {error}") from None


class LoginAuth(httpx.Auth):
    """Sends the token of a login with each request, and renews it before it expires."""

    def __init__(
        self, url: str, file: LoginFile, login: Login, *, now: Callable[[], float] = time.time
    ) -> None:
        self._url, self._file, self._login, self._now = url, file, login, now

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if self._login.is_due(self._now()):
            self._login = self._renewed()
        request.headers["Authorization"] = f"Bearer {self._login.token}"
        yield request

    def _renewed(self) -> Login:
        """The login with a good token: renewed by another command of this user, or now. A refresh token may be good once."""
        known = self._file.find(self._url) or self._login
        if not known.is_due(self._now()):
            return known
        try:
            renewed = renew(known)
        except LoginError:
            known = self._file.find(self._url) or known
            if known.is_due(self._now()):
                raise
            return known
        self._file.keep(self._url, renewed)
        return renewed


class _OAuthError(LoginError):
    """An error that the provider names by a code of RFC 6749 or RFC 8628."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _ask(http: httpx.Client, method: str, url: str, data: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The JSON object of an answer. Raises _OAuthError for an error by its code, LoginError for anything else."""
    try:
        response = http.request(method, url, data=data, headers={"Accept": "application/json"})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LoginError(f"{url} does not answer: {str(error) or type(error).__name__}") from None
    body: Any = None
    if len(response.content) <= _ANSWER_LIMIT_BYTES:
        with contextlib.suppress(ValueError):
            body = response.json()
    if not isinstance(body, dict):
        raise LoginError(f"{url} answered {response.status_code} without a JSON object")
    if response.status_code != 200 or "error" in body:
        code, description = str(body.get("error", response.status_code)), body.get("error_description")
        raise _OAuthError(code, f"{url} refused: {code}{f' ({description})' if description else ''}")
    return body


def _endpoint(document: Mapping[str, Any], name: str, issuer: str) -> str:
    """An endpoint of discovery; only HTTPS, unless the issuer itself is on plain HTTP."""
    url = document.get(name)
    if not isinstance(url, str):
        raise LoginError(f"{issuer} offers no {name}: give its client the device flow, or use a token")
    if not url.startswith("https://") and issuer.startswith("https://"):
        raise LoginError(f"the {name} of {issuer} is {url!r}, which is no https address")
    return url


def _login_of(answer: Mapping[str, Any], token_endpoint: str, client_id: str) -> Login:
    """The login of an answer with tokens: the ID token, whose audience is the client, else the access token."""
    token = answer.get("id_token") or answer.get("access_token")
    if not isinstance(token, str) or not token:
        raise LoginError(f"{token_endpoint} gave no token")
    refresh = answer.get("refresh_token")
    return Login(
        token, _expiry(token), refresh if isinstance(refresh, str) else None, token_endpoint, client_id
    )


def _expiry(token: str) -> float | None:
    """The `exp` of a JWT, which is not verified here; None where it has none."""
    with contextlib.suppress(ValueError, IndexError, KeyError, TypeError, AttributeError):
        payload = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"])
    return None
