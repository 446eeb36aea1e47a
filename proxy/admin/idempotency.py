"""`Idempotency-Key` on the admin API: the same key and body again gives the same answer and changes nothing.

The answer is stored in the transaction of the change itself, sealed with a key derived from the key secret, because the
answer to a new key holds that key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.schema import idempotent_admin_calls as calls
from proxy.openai.errors import INVALID, ApiError, invalid

KEPT_MS = 24 * 3_600_000
_NONCE_BYTES = 12


@dataclass(frozen=True)
class IdempotentCall:
    """One keyed call. `key` is a hash over caller and key, so two tokens never see each other's answers."""

    key: str
    body_hash: str
    seal: bytes

    @classmethod
    def of(cls, key: str, caller: str, method: str, path: str, body: bytes, secret: bytes) -> IdempotentCall:
        """Raises ApiError 400 for a key that is empty or longer than 255 characters."""
        if not 1 <= len(key) <= 255:
            raise invalid("Idempotency-Key has 1 to 255 characters", "Idempotency-Key")
        name = hashlib.sha256(f"{caller}\n{key}".encode()).hexdigest()
        request = hashlib.sha256(f"{method} {path}\n".encode() + body).hexdigest()
        return cls(name, request, hmac.digest(secret, b"sealed answers of the admin API", "sha256"))

    async def replay(self, c: AsyncConnection) -> tuple[int, bytes] | None:
        """(status, answer) of the first time, or None when this is it. Calls with a key run one after another.

        Raises ApiError 422 when the key came with another request before, 410 when its answer cannot be read any more.
        """
        await audit.lock(c)
        query = select(calls.c.body_hash, calls.c.status, calls.c.answer).where(calls.c.key == self.key)
        row = (await c.execute(query)).one_or_none()
        if row is None:
            return None
        if row.body_hash != self.body_hash:
            message = "this Idempotency-Key was used with another request; use a new one for a new request"
            raise ApiError(422, INVALID, "idempotency_mismatch", message, param="Idempotency-Key")
        sealed = bytes(row.answer)
        try:
            nonce, text = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
            return row.status, AESGCM(self.seal).decrypt(nonce, text, self.key.encode())
        except InvalidTag:
            message = "done before, but the key secret has changed since and the answer cannot be shown again"
            raise ApiError(410, INVALID, "idempotency_expired", message, param="Idempotency-Key") from None

    async def store(self, c: AsyncConnection, status: int, answer: bytes, now_ms: int) -> None:
        """Keep the answer for a day, in the caller's transaction."""
        await c.execute(delete(calls).where(calls.c.at_ms < now_ms - KEPT_MS))
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + AESGCM(self.seal).encrypt(nonce, answer, self.key.encode())
        row = {"key": self.key, "body_hash": self.body_hash, "status": status, "answer": sealed, "at_ms": now_ms}
        await c.execute(insert(calls).values(row))
