"""Sends one signed webhook (standardwebhooks.com) to a public address, within a time limit.

The name is resolved once and the address called is the address checked, so that DNS rebinding does not reach private
networks; addresses inside IPv6 ones (mapped, 6to4, Teredo, NAT64) are checked too. Redirects are not followed,
proxies not used, answers not read. HMAC-SHA256 over id, Unix time and body; a secret `whsec_...` is base64 of the
key. No database.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

_SECRET_PREFIX = "whsec_"
_NAT64_NETWORK = ipaddress.ip_network("64:ff9b::/96")
_LOCAL_HOST_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
_USER_AGENT = "Slotline-Webhook/1"
_ADDRESSES_TRIED = 3


class AddressNotAllowedError(Exception):
    """The URL leads to an address that users may not have the server call."""


@dataclass(frozen=True)
class WebhookResponse:
    """Result of one try: the receiver's status, or the error instead. `permanent`: another try would end the same."""

    status: int | None
    error: str | None
    permanent: bool = False

    @property
    def delivered(self) -> bool:
        return self.status is not None and HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES


class WebhookSender:
    """Sends to an address that was resolved and checked once, so that DNS rebinding leads nowhere else.

    Redirects are not followed, proxies not used, answers not read.
    """

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=limit_s,
            # a connection belongs to one address, and the pool knows only names
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def send(
        self, url: str, body: bytes, headers: dict[str, str], *, anywhere: bool
    ) -> WebhookResponse:
        """POST `body`. With `anywhere` also to addresses of this machine and of private networks."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._send(httpx.URL(url), body, headers, anywhere)
        except AddressNotAllowedError as error:
            return WebhookResponse(None, str(error), permanent=True)
        except TimeoutError:
            return WebhookResponse(None, f"no answer within {self._limit_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError, UnicodeError) as error:
            return WebhookResponse(None, f"{type(error).__name__}: {error}"[:500])

    async def _send(
        self, url: httpx.URL, body: bytes, headers: dict[str, str], anywhere: bool
    ) -> WebhookResponse:
        error: Exception = OSError("no address")
        for address in (await _resolve_addresses(url, anywhere))[:_ADDRESSES_TRIED]:
            request = self._client.build_request(
                "POST",
                url.copy_with(host=address),
                content=body,
                headers={
                    "content-type": "application/json",
                    "user-agent": _USER_AGENT,
                    "host": url.netloc.decode("ascii"),
                    **headers,
                },
                extensions={"sni_hostname": url.host},  # the certificate is checked for that name
            )
            try:
                response = await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as failure:
                error = failure
                continue
            await response.aclose()
            status = response.status_code
            gone = status == HTTPStatus.GONE
            refused = None if 200 <= status < 300 else f"the receiver answered {status}"
            return WebhookResponse(status, refused, permanent=gone)
        raise error


async def _resolve_addresses(url: httpx.URL, anywhere: bool) -> list[str]:
    """The addresses of the URL's host now. Raises AddressNotAllowedError where one of them may not be called."""
    port = url.port or (443 if url.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    entries: list[Any] = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in entries))
    if not anywhere and (private := [address for address in addresses if not is_public(address)]):
        raise AddressNotAllowedError(
            f"{url.host} is {private[0]}, an address of this machine or of a private network: "
            "SLOTLINE_WEBHOOKS_ANYWHERE=true allows those"
        )
    return addresses


def is_public(address: str) -> bool:
    """False for loopback, private, link-local, shared, reserved and multicast addresses, also inside an IPv6 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if inner is None and ip in _NAT64_NETWORK:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


def is_known_private(host: str) -> bool:
    """True for a host that is certainly not public: a private address, or a name of this machine.

    Other names are checked when they are resolved.
    """
    host = host.strip("[]").rstrip(".").lower()
    if host in _LOCAL_HOST_NAMES or host.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        return not is_public(host)
    except ValueError:
        return False


def signature_headers(secret: str, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Headers by which a receiver checks the message, as of standardwebhooks.com."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": webhook_signature(secret, message_id, timestamp, body),
    }


def webhook_signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`: HMAC-SHA256 over id, Unix time and body, so that none of them can be replaced.

    A secret `whsec_...` is base64 of the key; any other text is the key.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(_signing_key(secret), signed, hashlib.sha256).digest()).decode()


def _signing_key(secret: str) -> bytes:
    if secret.startswith(_SECRET_PREFIX):
        try:
            return base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True)
        except binascii.Error:
            pass
    return secret.encode()
