"""How what is sent to a webhook is signed: as standardwebhooks.com says, whose libraries check it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

_PREFIX = "whsec_"


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`: HMAC-SHA256 over id, Unix time and body, so that none of them can be replaced.

    A secret `whsec_...` is base64 of the key; any other text is the key.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(_key(secret), signed, hashlib.sha256).digest()).decode()


def headers(secret: str, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """What a receiver checks."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(secret, message_id, timestamp, body),
    }


def _key(secret: str) -> bytes:
    if secret.startswith(_PREFIX):
        try:
            return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
        except binascii.Error:
            pass
    return secret.encode()
