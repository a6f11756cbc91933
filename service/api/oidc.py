"""Verifies JWTs of one OpenID Connect issuer with its published keys (JWKS), and maps claims to a Principal.

Nothing in a token says how it is checked: issuer, audience and algorithms are settings, and the issuer's own document
(OpenID Connect Discovery) names the address of its keys. Both are fetched rarely, whatever key ids callers send.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from service.settings.settings import Settings
from service.spec.job import OWNER_PATTERN
from service.spec.principals import Principal, Role

logger = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""With a public key only: never `none`, and no HS..., for which the public key would be the secret."""
_LEEWAY_S = 30
_TOKEN_MAX_CHARS = 16_384
_RSA_MIN_BITS = 2048
_REFRESH_AFTER_S = 600.0
"""Age at which keys are read again."""
_KEYS_EXPIRE_AFTER_S = 3600.0
"""Age at which keys are no longer used: an identity provider may be away for this time."""
_MIN_FETCH_INTERVAL_S = 30.0
"""Least time between two reads of the keys, whatever key ids callers make up."""
_FETCH_TIMEOUT_S = 5.0
_ANSWER_LIMIT_BYTES = 262_144
_DISCOVERY_PATH = "/.well-known/openid-configuration"
_MAX_KEYS = 100


class InvalidTokenError(Exception):
    """The token is not one that the issuer made for us and that is valid now; the message says why."""


class NoRoleError(Exception):
    """The token is good, and its claims give no role here, or no name."""


class IssuerUnavailableError(Exception):
    """The issuer's document or keys cannot be read now: nothing can be said of a token."""


@dataclass(frozen=True)
class SigningKey:
    """A public key, and the algorithms that it may be used with: what it says itself, else all of its kind."""

    public: Any
    algorithms: tuple[str, ...]


class IdentityProvider:
    """The issuer that the settings name."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert settings.oidc_issuer and settings.oidc_audience
        self._issuer, self._audience = settings.oidc_issuer, settings.oidc_audience
        self._name_claim, self._role_claim = settings.oidc_name_claim, settings.oidc_role_claim
        self._roles = settings.oidc_roles
        self.metadata = IssuerMetadata(settings.oidc_issuer, clock=clock)

    async def principal(self, token: str) -> Principal:
        """The principal that the token was issued to. Raises InvalidTokenError, NoRoleError or IssuerUnavailableError."""
        return self.principal_of(await self.claims(token))

    def principal_of(self, claims: Mapping[str, Any]) -> Principal:
        """The principal of verified claims. Raises NoRoleError."""
        return Principal(self._name(claims), self._role(claims))

    async def claims(self, token: str) -> dict[str, Any]:
        """The claims of a token that is valid now. Raises InvalidTokenError or IssuerUnavailableError."""
        if len(token) > _TOKEN_MAX_CHARS:
            raise InvalidTokenError(f"it has more than {_TOKEN_MAX_CHARS} characters")
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            raise InvalidTokenError(str(error)) from None
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in ALGORITHMS:
            raise InvalidTokenError(f"its algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}")
        key = await self.metadata.find_key(key_id)
        if key is None:
            raise InvalidTokenError(f"the issuer has no key {key_id!r}")
        if algorithm not in key.algorithms:
            raise InvalidTokenError(f"the key {key_id!r} is not for the algorithm {algorithm}")
        try:
            return jwt.decode(
                token,
                key=key.public,
                algorithms=key.algorithms,
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise InvalidTokenError(str(error)) from None

    async def close(self) -> None:
        await self.metadata.close()

    def _name(self, claims: Mapping[str, Any]) -> str:
        value = claims.get(self._name_claim)
        name = f"oidc:{value}"
        if not isinstance(value, str) or not value or not re.fullmatch(OWNER_PATTERN, name):
            raise NoRoleError(
                f"the token's claim {self._name_claim} is {value!a:.200}, no name of up to 195 printable ASCII characters"
            )
        return name

    def _role(self, claims: Mapping[str, Any]) -> Role:
        claim = _claim(claims, self._role_claim)
        values = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
        roles = [self._roles[value] for value in values if isinstance(value, str) and value in self._roles]
        if not roles:
            raise NoRoleError(
                f"the token's claim {self._role_claim} has none of the values to which this server gives a role"
            )
        return max(roles, key=list(Role).index)


class IssuerMetadata:
    """The document that an issuer publishes about itself, and its public keys by their ids."""

    def __init__(self, issuer: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer, self._clock = issuer, clock
        self._keys: dict[str | None, SigningKey] = {}
        self._document: dict[str, Any] = {}
        self._read_at = self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def find_key(self, key_id: Any) -> SigningKey | None:
        """The key with this id, or the only one where none is named; None where there is none.

        Raises IssuerUnavailableError where no keys are known, or too old ones.
        """
        await self._be_current(missing=self._look_up(key_id) is None)
        return self._look_up(key_id)

    async def document(self) -> Mapping[str, Any]:
        """The issuer's document, whose `issuer` is the configured one. Raises IssuerUnavailableError."""
        await self._be_current()
        return self._document

    async def _be_current(self, *, missing: bool = False) -> None:
        """Read document and keys anew where they are too old or lack something; what is merely old is read behind this."""
        if self._age() > _KEYS_EXPIRE_AFTER_S or missing:
            if (asking := self._ask()) is not None:
                await asyncio.shield(asking)
            if self._age() > _KEYS_EXPIRE_AFTER_S:
                raise IssuerUnavailableError(f"document and keys of {self._issuer} cannot be read")
        elif self._age() > _REFRESH_AFTER_S:
            self._ask()  # nobody waits for it: what is at hand is still good

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _age(self) -> float:
        return self._clock() - self._read_at

    def _look_up(self, key_id: Any) -> SigningKey | None:
        if key_id is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(key_id) if isinstance(key_id, str) else None

    def _ask(self) -> asyncio.Task[None] | None:
        """The question that is being asked, begun now unless the last one was a moment ago."""
        if self._asking is not None and not self._asking.done():
            return self._asking
        if self._clock() - self._asked_at < _MIN_FETCH_INTERVAL_S:
            return None
        self._asked_at = self._clock()
        self._asking = asyncio.create_task(self._read())
        return self._asking

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(_FETCH_TIMEOUT_S):
                document = await self._fetch(self._issuer.rstrip("/") + _DISCOVERY_PATH)
                if not isinstance(document, dict) or document.get("issuer") != self._issuer:
                    raise ValueError("the document that it publishes is not of this issuer")
                keys = usable_keys(await self._fetch(endpoint(document, "jwks_uri")))
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            OSError,
            TimeoutError,
            ValueError,
            RecursionError,
        ) as error:
            reason = str(error) or type(error).__name__
            logger.warning("document and keys of the issuer %s cannot be read: %s", self._issuer, reason)
            return
        self._keys, self._document, self._read_at = keys, document, self._clock()

    async def _fetch(self, url: str) -> Any:
        status, body = await fetch_json("GET", url)
        if status != 200:
            raise ValueError(f"{url} answered {status}")
        return body


async def fetch_json(
    method: str, url: str, *, form: Mapping[str, str] | None = None, auth: tuple[str, str] | None = None
) -> tuple[int, Any]:
    """Status and JSON of an answer; follows no redirect. Raises httpx's errors; ValueError for no or too long JSON."""
    async with (
        httpx.AsyncClient(timeout=_FETCH_TIMEOUT_S, follow_redirects=False) as client,
        client.stream(method, url, data=form, auth=auth, headers={"Accept": "application/json"}) as response,
    ):
        content = bytearray()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > _ANSWER_LIMIT_BYTES:
                raise ValueError(f"the answer of {url} is longer than {_ANSWER_LIMIT_BYTES} bytes")
        try:
            return response.status_code, json.loads(content)
        except ValueError:
            raise ValueError(f"{url} answered {response.status_code} without JSON") from None


def endpoint(document: Mapping[str, Any], name: str) -> str:
    """An address in an issuer's document; only https, unless the issuer is on plain HTTP (of this machine). ValueError."""
    url = document.get(name)
    if not isinstance(url, str) or not url.startswith(("https://", "http://")):
        raise ValueError(f"the issuer's document names no {name}")
    if not url.startswith("https://") and document["issuer"].startswith("https://"):
        raise ValueError(f"the issuer's {name} is {url!r}, which is no https address")
    return url


def usable_keys(document: Any) -> dict[str | None, SigningKey]:
    """The public keys for signatures in a JWK set, by id; others are left out. ValueError where there are none."""
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) > _MAX_KEYS:
        raise ValueError(f"it is no JWK set with a list `keys` of at most {_MAX_KEYS}")
    keys: dict[str | None, SigningKey] = {}
    for entry in entries:
        if isinstance(entry, dict) and (key := _signing_key(entry)) is not None:
            key_id = entry.get("kid")
            keys[key_id if isinstance(key_id, str) else None] = key
    if not keys:
        raise ValueError("it holds no public key for signatures that can be used")
    return keys


def _signing_key(entry: Mapping[str, Any]) -> SigningKey | None:
    """The public key of an entry; None for a secret one, one for other work, and one too weak."""
    if entry.get("kty") not in ("RSA", "EC", "OKP") or entry.get("use", "sig") != "sig":
        return None
    try:
        read = jwt.PyJWK.from_dict({name: value for name, value in entry.items() if name != "d"})
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if isinstance(read.key, RSAPublicKey) and read.key.key_size < _RSA_MIN_BITS:
        return None
    declared = entry.get("alg")
    if declared is None and entry["kty"] == "RSA":
        return SigningKey(read.key, tuple(name for name in ALGORITHMS if name[:2] in ("RS", "PS")))
    if (algorithm := declared or read.algorithm_name) not in ALGORITHMS:
        return None
    return SigningKey(read.key, (algorithm,))


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """A claim by its name, or by its path: `realm_access.roles`."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
