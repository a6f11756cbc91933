"""An OpenID Connect provider over HTTP: code flow with PKCE and refresh tokens, for one user who is logged in there.

It checks what a real one checks: the client, its secret and redirect URI, the verifier of a challenge, and that a code
and a refresh token are used once. What tests change are its fields.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from tests.service.api.test_oidc import AUDIENCE, KEYS, public_jwk, signed


@dataclass
class CodeProvider:
    """What the provider knows; `claims` replace those of the next ID tokens, `denies` is an error in place of a code."""

    url: str = ""
    redirect_uri: str = ""
    client_secret: str | None = None
    claims: dict[str, Any] = field(default_factory=dict)
    denies: str | None = None
    gives_refresh_tokens: bool = True
    is_away: bool = False
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    refresh_tokens: set[str] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)
    """Paths that were asked for, without queries."""

    def authorize(self, query: dict[str, str]) -> str:
        """The address that the user's browser is sent back to."""
        assert query["client_id"] == AUDIENCE and query["redirect_uri"] == self.redirect_uri, query
        assert query["response_type"] == "code" and query["code_challenge_method"] == "S256", query
        assert query["scope"].split()[0] == "openid"
        answer = {"state": query["state"], "iss": self.url}
        if self.denies:
            return f"{self.redirect_uri}?{urlencode({**answer, 'error': self.denies})}"
        code = secrets.token_urlsafe(16)
        self.codes[code] = query
        return f"{self.redirect_uri}?{urlencode({**answer, 'code': code})}"

    def tokens(self, form: dict[str, str], authorization: str | None) -> tuple[int, dict[str, Any]]:
        """The answer of the token endpoint."""
        if self.is_away:
            return 502, {}
        if self.client_secret is not None:
            basic = base64.b64encode(f"{AUDIENCE}:{self.client_secret}".encode()).decode()
            if authorization != f"Basic {basic}" and form.get("client_secret") != self.client_secret:
                return 401, {"error": "invalid_client"}
        nonce: dict[str, Any] = {}
        if form["grant_type"] == "authorization_code":
            asked = self.codes.pop(form["code"], None)
            challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest())
            if (
                asked is None
                or asked["code_challenge"] != challenge.rstrip(b"=").decode()
                or form["redirect_uri"] != asked["redirect_uri"]
            ):
                return 400, {"error": "invalid_grant"}
            nonce = {"nonce": asked["nonce"]}
        elif form["refresh_token"] in self.refresh_tokens:
            self.refresh_tokens.remove(form["refresh_token"])
        else:
            return 400, {"error": "invalid_grant"}
        answer = {"token_type": "Bearer", "access_token": "opaque"}
        if self.gives_refresh_tokens:
            answer["refresh_token"] = secrets.token_urlsafe(16)
            self.refresh_tokens.add(answer["refresh_token"])
        claims = {"iss": self.url, "aud": form["client_id"], "sub": "ana", **nonce, **self.claims}
        return 200, {**answer, "id_token": signed(**claims)}


@contextmanager
def code_provider() -> Iterator[CodeProvider]:
    """A provider that serves until the context is left; `redirect_uri` is set by whoever knows it."""
    provider = CodeProvider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = urlsplit(self.path)
            provider.seen.append(place.path)
            url = provider.url
            if place.path == "/authorize":
                query = {name: values[0] for name, values in parse_qs(place.query).items()}
                self.send_response(302)
                self.send_header("Location", provider.authorize(query))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            documents: dict[str, Any] = {
                "/.well-known/openid-configuration": {
                    "issuer": url,
                    "jwks_uri": f"{url}/keys",
                    "authorization_endpoint": f"{url}/authorize",
                    "token_endpoint": f"{url}/token",
                    "end_session_endpoint": f"{url}/end",
                },
                "/keys": {"keys": [public_jwk(name, alg, key) for name, (alg, key) in KEYS.items()]},
            }
            known = documents.get(place.path)
            self._answer(404 if known is None else 200, known)

        def do_POST(self) -> None:
            provider.seen.append(self.path)
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(text).items()}
            self._answer(*provider.tokens(form, self.headers.get("Authorization")))

        def _answer(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
