"""Single sign-on of the pages: OpenID Connect's authorization code flow with PKCE, and sessions in a sealed cookie.

A visitor is led to the identity provider and comes back with a code, which this server changes for an ID token that
oidc.py verifies. No process and no table keeps anything, so any replica goes on with what another began: what the flow
must remember travels sealed in `state`, and is good in the browser only whose cookie it names. The session is a cookie
that no script reads and no other site's page sends; it ends with its ID token, and `renew` continues it by the refresh
token inside. A write with a session must come from a page of this server (`is_own_page`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx
from fastapi import FastAPI, Request, Response

from service.api.oidc import (
    IdentityProvider,
    InvalidTokenError,
    IssuerUnavailableError,
    NoRoleError,
    endpoint,
    fetch_json,
)
from service.settings.settings import Settings
from service.spec.principals import Principal, Role
from service.store.secrets import NoSecretsKeyError, SealError, SecretBox

logger = logging.getLogger(__name__)

CALLBACK_PATH = "/login/callback"
SIGNED_ON = "slotline.signed_on"
"""In the scope of a request that is let through by a session: the name of its user."""
_SCOPE = "openid profile email"
_LOGIN_LIMIT_S = 600.0
"""Time that a visitor has at the provider."""
_COOKIE_MAX_CHARS = 3800
"""Browsers take 4096 with name and attributes: a refresh token that does not fit is left out."""
_NEXT_MAX_CHARS = 2000
_FLOW, _SESSION = "slotline:login", "slotline:session"
"""What is sealed, each for its use only; no user's secret has a colon in its name."""


class SignOnError(Exception):
    """Nobody is signed on; the message says why, `status` is that of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class PageSession:
    """A user of the pages, until `expires_at` (Unix seconds): the content of the session's cookie."""

    name: str
    role: Role
    expires_at: float
    refresh_token: str | None

    @property
    def principal(self) -> Principal:
        return Principal(self.name, self.role)


class SingleSignOn:
    """Logins of the pages at the identity provider of the settings."""

    def __init__(
        self,
        settings: Settings,
        provider: IdentityProvider,
        box: SecretBox,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        assert settings.oidc_issuer and settings.oidc_audience
        self._issuer, self._client_id = settings.oidc_issuer, settings.oidc_audience
        self._client_secret = settings.oidc_client_secret
        self._url, self._provider, self._box, self._now = settings.url, provider, box, now
        self._is_secure = settings.url.startswith("https://")
        prefix = "__Host-" if self._is_secure else ""  # which no other host, and no plain HTTP, can set
        self._session_cookie, self._browser_cookie = f"{prefix}slotline-session", f"{prefix}slotline-login"

    def session(self, request: Request) -> PageSession | None:
        """The session whose cookie the request carries; None without one that is valid now."""
        session = self._any_session(request)
        return session if session is not None and self._now() < session.expires_at else None

    def login_address(self, request: Request) -> str:
        """The address that leads to the provider, and back to the page that the request asks for."""
        page = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return f"{self._url}/login?{urlencode({'next': page})}"

    async def begin(self, request: Request, next_page: str, response: Response) -> str:
        """The provider's address for a login that ends at `next_page`; `response` gets the browser's cookie.

        Raises SignOnError.
        """
        authorize = endpoint_of(await self._document(), "authorization_endpoint")
        browser = request.cookies.get(self._browser_cookie) or ""
        if len(browser) < 40:
            browser = secrets.token_urlsafe(32)
        nonce, verifier = secrets.token_urlsafe(32), secrets.token_urlsafe(48)
        flow = {
            "browser": _digest(browser),
            "nonce": nonce,
            "verifier": verifier,
            "next": own_page(next_page),
            "until": self._now() + _LOGIN_LIMIT_S,
        }
        query = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": self._url + CALLBACK_PATH,
            "scope": _SCOPE,
            "state": self._seal(_FLOW, flow),
            "nonce": nonce,
            "code_challenge": _digest(verifier),
            "code_challenge_method": "S256",
        }
        self._set_cookie(response, self._browser_cookie, browser)
        return f"{authorize}{'&' if '?' in authorize else '?'}{urlencode(query)}"

    async def finish(self, request: Request) -> tuple[PageSession, str]:
        """The session of a visitor who comes back from the provider, and the page to go on to. Raises SignOnError."""
        answer = request.query_params
        flow = self._open(_FLOW, answer.get("state", ""))
        browser = request.cookies.get(self._browser_cookie, "")
        if flow is None or not hmac.compare_digest(flow["browser"], _digest(browser)):
            raise SignOnError(400, "this login did not begin in this browser: begin again")
        if self._now() > flow["until"]:
            raise SignOnError(
                400, f"this login began more than {_LOGIN_LIMIT_S / 60:.0f} minutes ago: begin again"
            )
        if answer.get("iss", self._issuer) != self._issuer:  # RFC 9207
            raise SignOnError(400, "the answer is of another issuer: begin again")
        if "error" in answer:
            described = f"{answer['error']} {answer.get('error_description', '')}".strip()
            raise SignOnError(403, f"the identity provider refused: {described:.300}")
        form = {
            "grant_type": "authorization_code",
            "code": answer.get("code", ""),
            "redirect_uri": self._url + CALLBACK_PATH,
            "code_verifier": flow["verifier"],
        }
        tokens = await self._ask_for_tokens(form)
        session, claims = await self._verified(tokens)
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), flow["nonce"].encode()):
            raise SignOnError(401, "the ID token is of another login (its nonce differs): begin again")
        logger.info("%s logged in as %s", session.name, session.role)
        return session, flow["next"]

    async def renew(self, request: Request) -> PageSession:
        """The session of the request's cookie with a new ID token. Raises SignOnError, of 404 where there is no cookie."""
        if self._session_cookie not in request.cookies:
            raise SignOnError(404, "nobody is logged in with this browser: log in")
        old = self._any_session(request)
        if old is None or old.refresh_token is None:
            raise SignOnError(401, "the session cannot be renewed: log in again")
        tokens = await self._ask_for_tokens(
            {"grant_type": "refresh_token", "refresh_token": old.refresh_token}
        )
        session, _ = await self._verified({"refresh_token": old.refresh_token, **tokens})
        if session.name != old.name:
            raise SignOnError(
                401, f"the new ID token is of {session.name}, the session of {old.name}: log in again"
            )
        return session

    def keep(self, session: PageSession, response: Response) -> None:
        """Set the session's cookie; it is gone when the browser ends."""
        sealed = self._seal(_SESSION, asdict(session))
        if len(sealed) > _COOKIE_MAX_CHARS:
            sealed = self._seal(_SESSION, {**asdict(session), "refresh_token": None})
        self._set_cookie(response, self._session_cookie, sealed)

    def end(self, response: Response) -> None:
        """Remove the session's cookie, and the browser's."""
        for name in (self._session_cookie, self._browser_cookie):
            response.delete_cookie(name, secure=self._is_secure, httponly=True, samesite="lax")

    def is_own_page(self, request: Request) -> bool:
        """True where a page of this server sends the request, as browsers say: Sec-Fetch-Site, or else Origin."""
        if (site := request.headers.get("sec-fetch-site")) is not None:
            return site == "same-origin"
        origin = urlsplit(request.headers.get("origin", "")).netloc.lower()
        return origin in {request.headers.get("host", "").lower(), urlsplit(self._url).netloc.lower()} - {""}

    async def provider_logout(self) -> str | None:
        """The page of the provider where users end their session there, too; None where it has none, or is away."""
        try:
            address = endpoint(await self._provider.metadata.document(), "end_session_endpoint")
        except (IssuerUnavailableError, ValueError):
            return None
        return f"{address}{'&' if '?' in address else '?'}{urlencode({'client_id': self._client_id})}"

    async def _document(self) -> Mapping[str, Any]:
        try:
            return await self._provider.metadata.document()
        except IssuerUnavailableError:
            raise SignOnError(503, "the identity provider does not answer: try again") from None

    async def _ask_for_tokens(self, form: Mapping[str, str]) -> dict[str, Any]:
        document = await self._document()
        url, auth = endpoint_of(document, "token_endpoint"), None
        form = {**form, "client_id": self._client_id}
        if self._client_secret is not None:
            secret = self._client_secret.get_secret_value()
            if "client_secret_basic" in document.get(
                "token_endpoint_auth_methods_supported", ["client_secret_basic"]
            ):
                auth = (quote(self._client_id, safe=""), quote(secret, safe=""))  # RFC 6749, section 2.3.1
            else:
                form["client_secret"] = secret
        try:
            status, tokens = await fetch_json("POST", url, form=form, auth=auth)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
            logger.warning("%s gave no tokens: %s", url, str(error) or type(error).__name__)
            raise SignOnError(503, "the identity provider does not answer: try again") from None
        if status >= 500:
            logger.warning("%s answered %s", url, status)
            raise SignOnError(503, "the identity provider does not answer: try again")
        if status != 200 or not isinstance(tokens, dict) or not isinstance(tokens.get("id_token"), str):
            reason = tokens.get("error") if isinstance(tokens, dict) else None
            logger.warning("%s gave no ID token: status %s, error %r", url, status, reason)
            raise SignOnError(
                401, f"the identity provider gave no ID token ({reason or status!s:.100}): begin again"
            )
        return tokens

    async def _verified(self, tokens: Mapping[str, Any]) -> tuple[PageSession, Mapping[str, Any]]:
        """The session of tokens that the provider just gave, and the claims of the ID token. Raises SignOnError."""
        try:
            claims = await self._provider.claims(tokens["id_token"])
            if claims.get("azp", self._client_id) != self._client_id:
                raise InvalidTokenError(f"it was made for the client {claims['azp']!r}")
            if claims["exp"] <= self._now():
                raise InvalidTokenError("it has expired: compare this server's clock with the provider's")
            principal = self._provider.principal_of(claims)
        except InvalidTokenError as error:
            raise SignOnError(401, f"the ID token is not valid: {error}") from None
        except NoRoleError as error:
            raise SignOnError(403, f"{error}: ask an admin") from None
        except IssuerUnavailableError:
            raise SignOnError(503, "the identity provider's keys cannot be read: try again") from None
        refresh = tokens.get("refresh_token")
        refresh = refresh if isinstance(refresh, str) else None
        return PageSession(principal.name, principal.role, float(claims["exp"]), refresh), claims

    def _any_session(self, request: Request) -> PageSession | None:
        """The session of the request's cookie, perhaps one that has expired."""
        content = self._open(_SESSION, request.cookies.get(self._session_cookie, ""))
        try:
            return None if content is None else PageSession(**{**content, "role": Role(content["role"])})
        except (KeyError, TypeError, ValueError):  # of another version of this server
            return None

    def _seal(self, use: str, content: Mapping[str, Any]) -> str:
        return self._box.seal(self._issuer, use, json.dumps(content))

    def _open(self, use: str, sealed: str) -> dict[str, Any] | None:
        try:
            return json.loads(self._box.open(self._issuer, use, sealed))
        except (SealError, ValueError):
            return None

    def _set_cookie(self, response: Response, name: str, value: str) -> None:
        response.set_cookie(name, value, secure=self._is_secure, httponly=True, samesite="lax")


def single_sign_on(settings: Settings, provider: object) -> SingleSignOn | None:
    """The logins of the pages; None without an identity provider, or without a key to seal sessions with."""
    if not isinstance(provider, IdentityProvider):
        return None
    try:
        return SingleSignOn(settings, provider, SecretBox.of(settings))
    except NoSecretsKeyError:
        logger.warning(
            "pages ask for a token and do not log in at %s: set SLOTLINE_SECRETS_KEY, which seals their sessions, the same "
            "on all servers of the database (openssl rand -hex 32 makes one)",
            settings.oidc_issuer,
        )
        return None


def sso_of(app: FastAPI) -> SingleSignOn | None:
    """The logins of the pages of an application made by `create_app`."""
    return app.state.sso


def own_page(place: str) -> str:
    """The path of a page of this server to go on to after a login; `/` for anything else, also for other servers."""
    is_path = place.startswith("/") and not place.startswith(("//", "/login", "/logout"))
    is_plain = place.isascii() and place.isprintable() and "\\" not in place and len(place) <= _NEXT_MAX_CHARS
    return place if is_path and is_plain else "/"


def endpoint_of(document: Mapping[str, Any], name: str) -> str:
    """An address of the issuer's document. Raises SignOnError."""
    try:
        return endpoint(document, name)
    except ValueError as error:
        raise SignOnError(503, f"nobody can log in here: {error}") from None


def _digest(text: str) -> str:
    """SHA-256 in base64url without padding: the challenge of a PKCE verifier (RFC 7636, section 4.2)."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
