"""`slotline login`: a user without a token logs in at the server's identity provider, which a real server then believes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from service.settings.settings import Settings
from tests.service.api.test_oidc import AUDIENCE, KEYS, ROLES, public_jwk, signed
from tests.service.cli.conftest import Run
from tests.service.serving import serve


@pytest.fixture
def issuer() -> Iterator[str]:
    """The address of a provider whose user confirms each code while the second answer is on its way."""
    polls: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            documents = {
                "/keys": {"keys": [public_jwk(name, alg, key) for name, (alg, key) in KEYS.items()]},
                "/.well-known/openid-configuration": {
                    "issuer": url,
                    "jwks_uri": f"{url}/keys",
                    "token_endpoint": f"{url}/token",
                    "device_authorization_endpoint": f"{url}/device",
                },
            }
            self._answer(200, documents[self.path])

        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            if self.path == "/device":
                code = {
                    "device_code": "d",
                    "user_code": "WDJB",
                    "verification_uri": f"{url}/go",
                    "interval": 0,
                }
                self._answer(200, code)
                return
            polls.extend(form["device_code"])
            if len(polls) == 1:
                self._answer(400, {"error": "authorization_pending"})
            else:
                self._answer(200, {"id_token": signed(iss=url, aud=form["client_id"][0], sub="ana")})

        def _answer(self, status: int, body: dict) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_a_user_logs_in_and_is_known_until_they_log_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, issuer: str
):
    settings = Settings(
        data_dir=tmp_path / "data",
        oidc_issuer=issuer,
        oidc_audience=AUDIENCE,
        oidc_roles=ROLES,
    )
    with serve(settings) as served:
        monkeypatch.setenv("SLOTLINE_URL", served.url)
        assert run("jobs").code == 1
        logged_in = run("login")
        assert (logged_in.code, logged_in.out) == (0, "oidc:ana: submitter\n"), logged_in.err
        assert f"open {issuer}/go and confirm the code WDJB" in logged_in.err
        assert run("jobs", "--json").json == []
        assert run("logout").out == f"logged out of {served.url}\n"
        assert run("logout").out == f"nobody is logged in at {served.url}\n"
        assert run("jobs").code == 1
        other = run("login", "--client-id", "another")
        assert other.code == 1 and "Audience" in other.err, "its token is for somebody else"


def test_a_server_without_a_provider_says_so(run: Run, served):
    refused = run("login")
    assert refused.code == 1 and f"{served.url} has no identity provider" in refused.err
