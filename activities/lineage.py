"""Digests that tie a figure to what it was computed from. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from activities.runtime import Evidence
from durable_jobs.contract.digest import request_digest


class Tenant(NamedTuple):
    """Whose data it is: nothing is read across."""

    organization: str
    project: str


def piece_digest(piece: Evidence) -> str:
    """SHA-256 of one piece of evidence in canonical JSON (RFC 8785)."""
    return request_digest(piece.model_dump(mode="json"))


def evidence_digest(pieces: Iterable[Evidence]) -> str:
    """SHA-256 of the pieces that a run was given, in their order."""
    return request_digest({"evidence": [[piece.evidence_id, piece_digest(piece)] for piece in pieces]})
