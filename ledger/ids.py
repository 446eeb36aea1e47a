"""Identifiers for rows that people read: a word, then 26 letters that sort by time ("team_0jdzr5xk…")."""

from __future__ import annotations

import secrets

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32, without i, l, o, u


def new_id(word: str, at_ms: int) -> str:
    """48 bits of milliseconds and 80 random bits (the ULID layout), so that listing by id lists by age."""
    number = at_ms << 80 | secrets.randbits(80)
    return word + "_" + "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))
