"""JSON as it comes in, read strictly: what two readers could read differently is refused, and the field is named.

NaN, infinities, lone surrogates, depth and digits are left to the data rules, which name the path of each; here they
only have to survive until then.
"""

import json
import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

from durable_jobs.contract.errors import FieldProblem, InvalidInput, field_path
from durable_jobs.contract.rules import MAX_DEPTH, MAX_DIGITS

_LONG_NUMBER = re.compile(rf"(?<![0-9])[0-9]{{{MAX_DIGITS + 1}}}")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[][{}:]')


class _Twice(dict[str, Any]):
    """An object that had a key twice."""

    key = ""


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object. Raises `InvalidInput`."""
    twice: list[_Twice] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) == len(pairs):
            return members
        seen: set[str] = set()
        marked = _Twice(members)
        marked.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        twice.append(marked)
        return marked

    try:
        text = body.decode()
        # A function of ours for each number would take longer than all the rest.
        value = json.loads(text, object_pairs_hook=made, parse_int=_integer if _LONG_NUMBER.search(text) else None)
    except UnicodeDecodeError as error:
        raise InvalidInput.at("(whole)", f"must be UTF-8, is not at byte {error.start}") from None
    except RecursionError:
        raise InvalidInput.at(_deep_member(text), f"must be nested at most {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise InvalidInput.at("(whole)", f"is not JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise InvalidInput.at("(whole)", "must be a JSON object")
    if twice:
        raise InvalidInput(FieldProblem(path, "stands twice in its object") for path in islice(_paths(value), 10))
    return value


def _integer(digits: str) -> int:
    """Exact; one of too many digits as the least of these, since reading it would take quadratic time."""
    return int(digits) if len(digits) <= MAX_DIGITS + 1 else 10**MAX_DIGITS


def _paths(value: object) -> Iterable[str]:
    """The paths of the keys that stand twice, outermost first."""
    level: list[tuple[object, tuple[str | int, ...]]] = [(value, ())]
    while level:
        below: list[tuple[object, tuple[str | int, ...]]] = []
        for node, path in level:
            if isinstance(node, _Twice):
                yield field_path((*path, node.key))
            if isinstance(node, dict):
                below += [(child, (*path, key)) for key, child in node.items()]
            elif isinstance(node, list):
                below += [(child, (*path, index)) for index, child in enumerate(node)]
        level = below


def _deep_member(text: str) -> str:
    """Which member of the outermost object is nested too deep."""
    depth, member, string = 0, "(whole)", ""
    for token in _TOKEN.finditer(text):
        match token[0][0]:
            case "{" | "[":
                depth += 1
                if depth > MAX_DEPTH:
                    break
            case "}" | "]":
                depth -= 1
            case ":" if depth == 1:
                member = json.loads(string)
            case '"':
                string = token[0]
    return member
