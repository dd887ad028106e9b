"""The request digest: what makes two submissions under one idempotency key the same request."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import rfc8785

_SAFE = 2**53 - 1
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":"))


def request_digest(facts: Mapping[str, Any]) -> str:
    """SHA-256, in hex, over the RFC 8785 form of `facts`.

    Key order, white space and `1` against `1.0` don't matter. Integers beyond ±(2^53−1), which RFC 8785 can't carry,
    enter as their exact decimal text behind a NUL, which no stored string can hold; a float of that size is the
    integer that its shortest decimal form names, as Postgres stores it.
    """
    # For plain values both write the same bytes, and an envelope has a seal for each of its fields: in C they cost a
    # tenth. A test holds the two against each other.
    canonical = _ENCODER.encode(facts).encode() if _plain(facts) else rfc8785.dumps(_carriable(facts))
    return hashlib.sha256(canonical).hexdigest()


def _plain(value: Any) -> bool:
    """Whether Python's own encoder writes the value in its RFC 8785 form: it formats floats in another way, and orders
    keys by code points where the RFC orders UTF-16's units."""
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and key.isascii() and _plain(child) for key, child in value.items())
    if kind is list:
        return all(map(_plain, value))
    return kind is str or value is None or kind is bool or (kind is int and abs(value) <= _SAFE)


def _carriable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _carriable(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_carriable(child) for child in value]
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and abs(value) > _SAFE:
        return f"\x00{_shortest_integer(value)}"
    if isinstance(value, int) and abs(value) > _SAFE:
        return f"\x00{value:d}"
    return value


def _shortest_integer(value: float) -> int:
    mantissa, _, exponent = repr(value).partition("e")
    whole, _, fraction = mantissa.partition(".")
    power = int(exponent or 0) - len(fraction)
    digits = int(whole + fraction)
    shifted: int = digits * 10**power if power >= 0 else digits // 10**-power
    return shifted
