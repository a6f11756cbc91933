"""One call of a webhook: to addresses that may be called, within a limit of time, whatever the receiver does."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from service.public_addresses import is_public

_USER_AGENT = "Slotline-Webhook/1"
_ADDRESSES_TRIED = 3


class NotAllowedError(Exception):
    """The URL leads to an address that users may not have the server call."""


@dataclass(frozen=True)
class Answer:
    """What a try brought: the receiver's status, or why there is none. `useless`: another try would end the same."""

    status: int | None
    error: str | None
    useless: bool = False

    @property
    def delivered(self) -> bool:
        return self.status is not None and HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES


class WebhookSender:
    """Sends to one address that was looked up and found allowed: a name that changes its mind is asked once.

    Redirects are not followed, proxies not used, answers not read.
    """

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=limit_s,
            limits=httpx.Limits(
                max_keepalive_connections=0
            ),  # a connection is its address's, the pool knows names only
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, url: str, body: bytes, headers: dict[str, str], *, anywhere: bool) -> Answer:
        """POST `body`. With `anywhere` also to addresses of this machine and of private networks."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._send(httpx.URL(url), body, headers, anywhere)
        except NotAllowedError as error:
            return Answer(None, str(error), useless=True)
        except TimeoutError:
            return Answer(None, f"no answer within {self._limit_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError, UnicodeError) as error:
            return Answer(None, f"{type(error).__name__}: {error}"[:500])

    async def _send(self, url: httpx.URL, body: bytes, headers: dict[str, str], anywhere: bool) -> Answer:
        error: Exception = OSError("no address")
        for address in (await _addresses(url, anywhere))[:_ADDRESSES_TRIED]:
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
                extensions={"sni_hostname": url.host},  # and its certificate is checked for that name
            )
            try:
                response = await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as one:
                error = one
                continue
            await response.aclose()
            status = response.status_code
            gone = status == HTTPStatus.GONE
            refused = None if 200 <= status < 300 else f"the receiver answered {status}"
            return Answer(status, refused, useless=gone)
        raise error


async def _addresses(url: httpx.URL, anywhere: bool) -> list[str]:
    """Where the name leads now; NotAllowedError when one of the addresses may not be called."""
    port = url.port or (443 if url.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    found: list[Any] = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    if not anywhere and (private := [one for one in addresses if not is_public(one)]):
        raise NotAllowedError(
            f"{url.host} is {private[0]}, an address of this machine or of a private network: "
            "SLOTLINE_WEBHOOKS_ANYWHERE=true allows those"
        )
    return addresses
