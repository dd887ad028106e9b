"""Data rules for what enters the job table (the design, section 15): checks at the door, escapes on our own way out.

Why each rule: `jsonb` refuses U+0000, lone surrogates and NaN, accepts 1e100000 and prints it as 100 kB, and fails
on deep nesting; all measured on PostgreSQL 18.6.
"""

import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any, TypeVar

from pydantic import AfterValidator

from durable_jobs.contract.errors import FieldProblem, field_path

MAX_JSON_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_DIGITS = 400
MAX_KEY_CHARACTERS = 255
RESERVED_PAYLOAD_KEYS = frozenset({"execution", "governance"})
RESERVED_QUEUE_SUFFIX = ".reconciliation"
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
LATEST = datetime(2201, 1, 1, tzinfo=UTC)

T = TypeVar("T")

_LARGEST = 10**MAX_DIGITS
# Controls, format characters, separators other than the space, surrogates, private use, noncharacters: by their ranges,
# as str.isprintable also refuses what its own version of Unicode doesn't know yet. SQL's `key_problem` has the same.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f\u2028-\u202f"
    "\u205f-\u206f\u3000\ud800-\uf8ff\ufdd0-\ufdef\ufeff\ufff0-\ufffb\ufffe\uffff\U000110bd\U000110cd"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U0001fffe\U0001ffff\U000e0000-\U0010ffff]"
)
_RETRY_SUFFIX = re.compile(r":retry-\d{1,10}\Z")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_PLAIN = frozenset({dict, list, str, int, float, bool, type(None)})


def checked(problem_of: Callable[[T], str | None]) -> AfterValidator:
    """One of the rules below, as a pydantic validator."""

    def check(value: T) -> T:
        if problem := problem_of(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def identifier_problem(value: str) -> str | None:
    """What is wrong with an organization, project, queue or job type; None when nothing is."""
    return None if IDENTIFIER.fullmatch(value) else f"must match {IDENTIFIER.pattern}"


def hosted_queue_problem(value: str) -> str | None:
    """What is wrong with a queue as rows bear it: plain, or an organization's isolated `<queue>@<organization>`."""
    for part in value.split("@", 1):
        if problem := identifier_problem(part):
            return problem
    return None


def key_problem(value: str) -> str | None:
    """What is wrong with an idempotency or operation key: 1 to 255 printable characters, not all blank."""
    if not 1 <= len(value) <= MAX_KEY_CHARACTERS:
        return f"must have 1 to {MAX_KEY_CHARACTERS} characters, has {len(value)}"
    if _UNPRINTABLE.search(value) or not value.strip(" "):
        return "must be printable characters, not all blank"
    return None


def operation_key_problem(value: str) -> str | None:
    """As `key_problem`, with room for what a later intent appends to a handler's key: `:retry-<n>`."""
    return key_problem(_RETRY_SUFFIX.sub("", value) or value)


def time_problem(value: datetime) -> str | None:
    """What is wrong with a time: it must carry a zone and lie within the years 2000 to 2200."""
    if value.utcoffset() is None:
        return "must carry a time zone"
    return None if EARLIEST <= value < LATEST else "must lie within the years 2000 to 2200"


def text_problem(value: str, limit: int) -> str | None:
    """What is wrong with free text such as a reason: no NUL, no lone surrogate, at most `limit` characters."""
    if _UNSTORABLE.search(value):
        return "must hold no U+0000 and no lone surrogate"
    return None if len(value) <= limit else f"must have at most {limit} characters, has {len(value)}"


def json_problem(value: object, root: str) -> FieldProblem | None:
    """The first thing that keeps `value` from being stored as a JSON object, named by its path below `root`.

    The walk keeps its own stack, so that depth is refused rather than exhausting Python's.
    """
    if not isinstance(value, dict):
        return FieldProblem(root, f"must be a JSON object, not {type(value).__name__}")
    stack: list[tuple[object, tuple[str | int, ...]]] = [] if _surely_storable(value) else [(value, (root,))]
    while stack:
        node, path = stack.pop()
        if (problem := _node_problem(node, len(path))) is not None:
            return FieldProblem(field_path(path), problem)
        if isinstance(node, dict):
            stack.extend((child, (*path, key)) for key, child in node.items())
        elif isinstance(node, list | tuple):
            stack.extend((child, (*path, index)) for index, child in enumerate(node))
    size = len(encode_json(value).encode())
    return None if size <= MAX_JSON_BYTES else FieldProblem(root, f"must be at most {MAX_JSON_BYTES} bytes, is {size}")


def _surely_storable(value: object) -> bool:
    """Whether nothing in `value` is a problem; False also where only the walk can tell.

    Level by level, so that the loops are the interpreter's own: the walk takes seconds for millions of small values.
    """
    if type(value) is not dict:
        return False
    objects: list[Any] = [value]
    arrays: list[Any] = []
    for _ in range(MAX_DEPTH):
        values = chain(chain.from_iterable(map(dict.values, objects)), chain.from_iterable(arrays))
        children = list(islice(values, MAX_JSON_BYTES // 2 + 1))
        if len(children) > MAX_JSON_BYTES // 2:  # more than there is room for, as where a list holds itself
            return False
        kinds, keys = set(map(type, children)), list(chain.from_iterable(objects))
        if not kinds <= _PLAIN or not set(map(type, keys)) <= {str}:
            return False
        texts = keys + _of(str, children, kinds)
        if any(map(_UNSTORABLE.search, texts)) or max(map(len, texts), default=0) > MAX_JSON_BYTES:
            return False
        if not all(map(math.isfinite, _of(float, children, kinds))):
            return False
        if (numbers := _of(int, children, kinds)) and not -_LARGEST < min(numbers) <= max(numbers) < _LARGEST:
            return False
        objects, arrays = _of(dict, children, kinds), _of(list, children, kinds)
        if not objects and not arrays:
            return True
    return False


def _of(kind: type, values: list[Any], kinds: set[type]) -> list[Any]:
    """Those of `values`, whose types are `kinds`, that are exactly of this one."""
    if kinds == {kind}:
        return values
    return [value for value in values if type(value) is kind] if kind in kinds else []


def finite_problem(value: object, root: str) -> FieldProblem | None:
    """The first NaN or infinity in what is yet to be dumped as JSON: pydantic would write some of them as null."""
    stack: list[tuple[object, tuple[str | int, ...]]] = [(value, (root,))]
    while stack:
        node, path = stack.pop()
        if isinstance(node, float) and not math.isfinite(node):
            return FieldProblem(field_path(path), "must be finite")
        if isinstance(node, dict):
            stack.extend((child, (*path, str(key))) for key, child in node.items())
        elif isinstance(node, list | tuple):
            stack.extend((child, (*path, index)) for index, child in enumerate(node))
    return None


def _node_problem(node: object, depth: int) -> str | None:
    if node is None or isinstance(node, bool):
        return None
    if isinstance(node, str):
        return text_problem(node, MAX_JSON_BYTES)
    if isinstance(node, int):
        return None if -_LARGEST < node < _LARGEST else f"must have at most {MAX_DIGITS} digits"
    if isinstance(node, float):
        return None if math.isfinite(node) else "must be finite"
    if not isinstance(node, dict | list | tuple):
        return f"must be a JSON value, not {type(node).__name__}"
    if depth > MAX_DEPTH:
        return f"must be nested at most {MAX_DEPTH} deep"
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str):
                return f"must have text keys, not {type(key).__name__}"
            if problem := text_problem(key, MAX_JSON_BYTES):
                return f"key {ascii(key)[:80]} {problem}"
    return None


def encode_json(value: object) -> str:
    """JSON text of a checked value."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def storable_text(value: object, limit: int) -> str:
    """`value` as text that Postgres takes: U+0000 and lone surrogates escaped, cut at `limit` characters. Never raises.

    For our own failure path, where refusing the text would lose the transition it explains.
    """
    try:
        text = str(value)
    except BaseException as error:
        text = f"<{type(value).__name__} whose text raised {type(error).__name__}>"
    # Cut once more after the escapes, which lengthen it: what was made storable is left as it is the next time.
    return _cut(_UNSTORABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", _cut(text, limit)), limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def evidence_of(value: object, limit: int = 8192) -> str:
    """A bounded text form of a result that can't be stored, to be kept as evidence. Never raises."""
    try:
        text = json.dumps(value, default=repr, ensure_ascii=False)
    except Exception:
        text = f"<{type(value).__name__} that has no text form>"
    return storable_text(text, limit)
