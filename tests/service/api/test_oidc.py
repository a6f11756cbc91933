"""JWTs of an identity provider: a server of keys made here, tokens good and forged."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from pydantic import ValidationError

from service.api import oidc
from service.api.oidc import IdentityProvider, InvalidTokenError, IssuerUnavailableError, usable_keys
from service.settings.settings import Settings
from service.spec.principals import Principal, Role
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.conftest import job_body

AUDIENCE = "slotline"
ROLES = {"ml-admins": "admin", "ml-users": "submitter", "all": "viewer"}
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
KEYS = {
    "r": ("RS256", RSA_KEY),
    "e": ("ES256", ec.generate_private_key(ec.SECP256R1())),
    "d": ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
}


def public_jwk(key_id: str, algorithm: str, key: Any, **more: Any) -> dict[str, Any]:
    kind = jwt.get_algorithm_by_name(algorithm)
    return {**kind.to_jwk(key.public_key(), as_dict=True), "kid": key_id, "use": "sig", **more}


@dataclass
class Issuer:
    """Publishes a document that is right, and keys beside it; counts who asks for the keys."""

    keys: list[dict[str, Any]] = field(
        default_factory=lambda: [public_jwk(name, alg, key) for name, (alg, key) in KEYS.items()]
    )
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    hangs: threading.Event | None = None
    asked: int = 0
    document: dict[str, Any] = field(default_factory=dict)
    """Fields in place of those of the document."""


class _IssuersServer(ThreadingHTTPServer):
    """Its address is known before a fixture lets it serve: tokens that tests make name it."""

    issuer: Issuer


class _Handler(BaseHTTPRequestHandler):
    server: _IssuersServer

    def do_GET(self) -> None:
        issuer = self.server.issuer
        headers, status = {}, 200
        if self.path == "/.well-known/openid-configuration":
            body = json.dumps({"issuer": ISSUER, "jwks_uri": f"{ISSUER}/keys", **issuer.document}).encode()
        else:
            issuer.asked += 1
            if issuer.hangs is not None:
                issuer.hangs.wait(60)
            body = json.dumps({"keys": issuer.keys}).encode() if issuer.body is None else issuer.body
            headers, status = issuer.headers, issuer.status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


SERVER = _IssuersServer(("127.0.0.1", 0), _Handler)
ISSUER = f"http://127.0.0.1:{SERVER.server_address[1]}"


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = SERVER.issuer = Issuer()
    thread = threading.Thread(target=SERVER.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        if issuer.hangs is not None:
            issuer.hangs.set()
        SERVER.shutdown()
        thread.join(10)


def settings(**changes: Any) -> dict[str, Any]:
    given = {
        "oidc_issuer": ISSUER,
        "oidc_audience": AUDIENCE,
        "oidc_roles": ROLES,
    }
    return {**given, **changes}


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    given = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "alice",
        "iat": now,
        "exp": now + 600,
        "roles": ["ml-users"],
    }
    return {name: value for name, value in {**given, **changes}.items() if value is not None}


def signed(key_id: str | None = "r", *, key: Any = None, algorithm: str | None = None, **changes: Any) -> str:
    own_algorithm, own_key = KEYS[key_id or "r"]
    headers = {} if key_id is None else {"kid": key_id}
    return jwt.encode(
        claims(**changes), key or own_key, algorithm=algorithm or own_algorithm, headers=headers
    )


def by_hand(header: dict[str, Any], payload: dict[str, Any], sign=lambda _: b"") -> str:
    """A token as a library would not make it."""

    def part(value: bytes) -> bytes:
        return base64.urlsafe_b64encode(value).rstrip(b"=")

    content = b".".join([part(json.dumps(header).encode()), part(json.dumps(payload).encode())])
    return b".".join([content, part(sign(content))]).decode()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def provider(issuer: Issuer) -> AsyncIterator[IdentityProvider]:
    provider = IdentityProvider(Settings(**settings()), clock=Clock())
    yield provider
    await provider.close()


@pytest.fixture
async def api(make_api: ApiMaker, issuer: Issuer) -> AsyncIterator[Api]:
    async with make_api(**settings()) as api:
        yield api


async def get(api: Api, token: str, path: str = "/api/v1/whoami"):
    return await api.client.get(path, headers={"Authorization": f"Bearer {token}"})


async def test_a_token_of_the_issuer_says_who_calls_and_as_what(api: Api, issuer: Issuer):
    assert api.service.settings.authenticates
    problem(await api.client.get("/api/v1/jobs"), 401)
    for key_id in KEYS:
        answer = await get(api, signed(key_id))
        assert answer.json() == {"name": "oidc:alice", "role": "submitter"}
    assert issuer.asked == 1
    headers = {"Authorization": f"Bearer {signed()}"}
    job = (await api.client.post("/api/v1/jobs", json=job_body(), headers=headers)).json()
    assert job["owner"] == "oidc:alice"
    cancel = f"/api/v1/jobs/{job['id']}/cancel"
    bob = {"Authorization": f"Bearer {signed(sub='bob')}"}
    assert "oidc:alice's" in problem(await api.client.post(cancel, headers=bob), 403)["detail"]
    assert (await api.client.post(cancel, headers=headers)).status_code == 202
    problem(await get(api, signed(), "/api/v1/audit"), 403)
    admin = await get(api, signed(roles=["all", "ml-admins", "else"]), "/api/v1/audit")
    assert [one["principal"] for one in admin.json()["items"]] == ["oidc:alice"] * 2
    password = base64.b64encode(f"me:{signed()}".encode()).decode()
    page = await api.client.get("/", headers={"Authorization": f"Basic {password}"})
    assert page.status_code == 200


FORGED = {
    "another key": lambda: signed(key=OTHER_RSA_KEY),
    "another issuer": lambda: signed(iss="https://evil.example"),
    "an issuer that begins as ours": lambda: signed(iss=ISSUER + ".evil"),
    "no issuer": lambda: signed(iss=None),
    "another audience": lambda: signed(aud="grafana"),
    "other audiences": lambda: signed(aud=["grafana", "slotline2"]),
    "no audience": lambda: signed(aud=None),
    "expired": lambda: signed(exp=int(time.time()) - 60),
    "no expiry": lambda: signed(exp=None),
    "not yet": lambda: signed(nbf=int(time.time()) + 300),
    "made in the future": lambda: signed(iat=int(time.time()) + 300),
    "alg none": lambda: by_hand({"alg": "none", "kid": "r"}, claims()),
    "alg None": lambda: by_hand({"alg": "None", "kid": "r"}, claims()),
    "no alg": lambda: by_hand({"kid": "r"}, claims()),
    "HS256 with the public key": lambda: by_hand(
        {"alg": "HS256", "kid": "r"},
        claims(),
        lambda content: hmac.new(public_pem(), content, hashlib.sha256).digest(),
    ),
    "the algorithm of another key": lambda: by_hand({"alg": "ES256", "kid": "r"}, claims()),
    "an unknown key": lambda: by_hand({"alg": "RS256", "kid": "x"}, claims()),
    "a key of its own": lambda: jwt.encode(
        claims(),
        OTHER_RSA_KEY,
        algorithm="RS256",
        headers={"kid": "own", "jwk": public_jwk("own", "RS256", OTHER_RSA_KEY)},
    ),
    "no key id, of several keys": lambda: signed(None),
    "a key id that is no text": lambda: by_hand({"alg": "RS256", "kid": ["r"]}, claims()),
    "a changed claim": lambda: changed(signed(), roles=["ml-admins"]),
    "no signature": lambda: signed().rpartition(".")[0] + ".",
    "not a token": lambda: "a.b.c",
    "a long one": lambda: signed(more="x" * 20_000),
    "claims that are a list": lambda: by_hand({"alg": "RS256", "kid": "r"}, []),
}


def public_pem() -> bytes:
    return RSA_KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def changed(token: str, **more: Any) -> str:
    head, body, signature = token.split(".")
    payload = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    new = base64.urlsafe_b64encode(json.dumps({**payload, **more}).encode()).rstrip(b"=").decode()
    return f"{head}.{new}.{signature}"


@pytest.mark.parametrize("kind", FORGED)
async def test_any_other_token_is_refused(provider: IdentityProvider, kind: str):
    assert (await provider.principal(signed())).role is Role.SUBMITTER
    with pytest.raises(InvalidTokenError):
        await provider.principal(FORGED[kind]())


async def test_a_refusal_is_401_and_says_why(api: Api):
    answer = await get(api, FORGED["expired"]())
    assert "expired" in problem(answer, 401)["detail"]
    assert answer.headers["www-authenticate"].startswith("Bearer"), "a browser asks nobody: its pages log in"


async def test_a_clock_may_be_a_little_off(provider: IdentityProvider):
    now = int(time.time())
    assert await provider.principal(signed(exp=now - 5, nbf=now + 5))


@pytest.mark.parametrize("roles", [None, [], ["guests"], "guests", {"ml-users": True}, [["ml-users"]], 7])
async def test_who_has_no_role_here_is_told_403(api: Api, roles: Any):
    assert "none of the values" in problem(await get(api, signed(roles=roles)), 403)["detail"]


@pytest.mark.parametrize("name", ["", "a\nb", "Zoë", 7, "x" * 300, None])
async def test_who_has_no_name_that_can_be_kept_is_told_403(api: Api, name: Any):
    token = by_hand_signed(claims(sub=name))
    assert problem(await get(api, token), 403 if isinstance(name, str | None) else 401)


def by_hand_signed(payload: dict[str, Any]) -> str:
    """PyJWT refuses to write some of these."""
    algorithm = jwt.get_algorithm_by_name("RS256")
    return by_hand({"alg": "RS256", "kid": "r"}, payload, lambda content: algorithm.sign(content, RSA_KEY))


async def test_roles_and_names_come_from_the_claims_that_the_settings_name(issuer: Issuer):
    nested = settings(oidc_role_claim="realm_access.roles", oidc_name_claim="email")
    flat = settings(oidc_role_claim="https://id.example/roles")
    provider = IdentityProvider(Settings(**nested))
    token = signed(realm_access={"roles": ["ml-admins"]}, email="a@example.com")
    assert await provider.principal(token) == Principal("oidc:a@example.com", Role.ADMIN)
    await provider.close()
    provider = IdentityProvider(Settings(**flat))
    found = await provider.principal(signed(**{"https://id.example/roles": "openid all ml-users"}))
    assert found == Principal("oidc:alice", Role.SUBMITTER)
    await provider.close()


async def test_a_new_key_is_found_and_made_up_ids_are_not_asked_for_again_and_again(
    provider: IdentityProvider, issuer: Issuer
):
    await provider.principal(signed())
    issuer.keys = [public_jwk("new", "RS256", OTHER_RSA_KEY)]
    token = jwt.encode(claims(), OTHER_RSA_KEY, algorithm="RS256", headers={"kid": "new"})
    for _ in range(5):  # a moment after the first question
        with pytest.raises(InvalidTokenError):
            await provider.principal(token)
    assert issuer.asked == 1
    provider.metadata._clock.now += 31
    assert (await provider.principal(token)).name == "oidc:alice"
    assert issuer.asked == 2
    with pytest.raises(InvalidTokenError, match="no key 'r'"):  # the old one is gone
        await provider.principal(signed())
    for number in range(20):
        with pytest.raises(InvalidTokenError):
            await provider.principal(by_hand({"alg": "RS256", "kid": f"k{number}"}, claims()))
    assert issuer.asked == 2


async def test_the_only_key_needs_no_id(provider: IdentityProvider, issuer: Issuer):
    issuer.keys = issuer.keys[:1]
    assert await provider.principal(signed(None))


async def test_an_issuer_that_is_away_is_borne_with_for_an_hour(provider: IdentityProvider, issuer: Issuer):
    clock = provider.metadata._clock
    await provider.principal(signed())
    issuer.status = 500
    for _ in range(3):
        clock.now += 601
        assert await provider.principal(signed())
        await provider.metadata._asking  # in the background: nobody has waited for it
    assert issuer.asked == 4
    clock.now += 3600
    with pytest.raises(IssuerUnavailableError):
        await provider.principal(signed())
    issuer.status = 200
    with pytest.raises(IssuerUnavailableError):  # asked a moment ago
        await provider.principal(signed())
    clock.now += 31
    assert await provider.principal(signed())


async def test_while_the_issuer_says_nothing_known_keys_go_on_and_unknown_ones_wait_for_a_limit(
    provider: IdentityProvider, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
):
    await provider.principal(signed())
    monkeypatch.setattr(
        oidc, "_FETCH_TIMEOUT_S", 0.2
    )  # from here on: what must succeed has all the time it needs
    issuer.hangs = threading.Event()
    provider.metadata._clock.now += 31
    with pytest.raises(InvalidTokenError):
        await provider.principal(by_hand({"alg": "RS256", "kid": "x"}, claims()))
    assert await provider.principal(signed())


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 404},
        {"status": 302, "headers": {"Location": "/elsewhere"}},
        {"body": b"<html>"},
        {"body": b"[]"},
        {"body": b'{"keys": {}}'},
        {"body": b'{"keys": []}'},
        {"body": b"[" * 100_000},
        {"body": b" " * 300_000},
        {"body": json.dumps({"keys": [{}] * 101}).encode()},
    ],
)
async def test_what_is_no_set_of_keys_is_503(api: Api, issuer: Issuer, answer: dict[str, Any]):
    for name, value in answer.items():
        setattr(issuer, name, value)
    answer = await get(api, signed())
    assert problem(answer, 503) and answer.headers["retry-after"]
    await get(api, signed())
    assert issuer.asked == 1


def test_only_public_keys_for_signatures_that_are_strong_enough_are_taken():
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    good = public_jwk("good", "RS256", RSA_KEY)
    others = [
        public_jwk("weak", "RS256", weak),
        public_jwk("enc", "RS256", RSA_KEY, use="enc"),
        public_jwk("hs", "RS256", RSA_KEY, alg="HS256"),
        {"kty": "oct", "kid": "oct", "k": "c2VjcmV0", "alg": "HS256"},
        {"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"},
        {"kty": "EC", "kid": "curve", "crv": "P-0", "x": "AA", "y": "AA"},
        "text",
        None,
    ]
    found = usable_keys({"keys": [*others, good]})
    assert list(found) == ["good"]
    assert not {"none", "HS256"} & set(found["good"].algorithms)
    with pytest.raises(ValueError, match="no public key"):
        usable_keys({"keys": others})


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://evil.example"},
        {"issuer": ISSUER + "/"},
        {"jwks_uri": None},
        {"jwks_uri": "file:///etc/keys"},
        {"jwks_uri": "http://127.0.0.1:1/keys"},
    ],
)
async def test_a_document_of_another_issuer_or_without_keys_is_503(
    api: Api, issuer: Issuer, document: dict[str, Any]
):
    issuer.document = document
    assert problem(await get(api, signed()), 503) and issuer.asked == 0


def test_an_issuer_on_https_has_its_endpoints_there_too():
    document = {"issuer": "https://id.example", "jwks_uri": "http://id.example/keys"}
    with pytest.raises(ValueError, match="no https address"):
        oidc.endpoint(document, "jwks_uri")
    assert oidc.endpoint({**document, "jwks_uri": "https://k"}, "jwks_uri") == "https://k"


@pytest.mark.parametrize("missing", ["oidc_issuer", "oidc_audience", "oidc_roles"])
def test_an_identity_provider_is_configured_wholly_or_not_at_all(missing: str):
    given = settings()
    del given[missing]
    with pytest.raises(ValidationError, match=f"SLOTLINE_{missing.upper()} too"):
        Settings(**given)
    with pytest.raises(ValidationError, match=r"SLOTLINE_OIDC_ISSUER, .* too"):
        Settings(oidc_client_secret="secret")


def test_an_issuer_is_reached_over_tls_or_on_this_machine():
    for url in ("http://id.example", "file:///etc/keys", "id.example"):
        with pytest.raises(ValidationError, match="https"):
            Settings(**settings(oidc_issuer=url))
    for url in ("https://id.example", "http://127.0.0.1:1", "http://[::1]:1/realm"):
        Settings(**settings(oidc_issuer=url))
