"""One seed for everything random: each use draws from a stream of its own, keyed by the seed and its name."""

from __future__ import annotations

import hashlib


def key(*parts: object) -> int:
    """A generator's seed from anything that has a text form: 63 bits of its SHA-256."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
