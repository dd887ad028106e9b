"""The history of a run: every call that a client made, with its answer and its times, one JSON object a line."""

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from durable_jobs.contract.errors import DurableJobsError, StoreUnavailable

T = TypeVar("T")


@dataclass(frozen=True)
class Operation:
    """One call. Times are seconds on the one monotonic clock of the process that all clients share.

    `error` names the typed error of a refusal. `unknown`: nobody can tell whether the call took effect.
    """

    client: str
    operation: str
    arguments: dict[str, Any]
    start: float
    end: float
    answer: dict[str, Any] | None = None
    error: str | None = None
    unknown: bool = False


class History:
    """Records calls into a file as they end."""

    def __init__(self, path: Path) -> None:
        self.operations: list[Operation] = []
        self._file = path.open("w", encoding="utf-8")

    async def call(
        self,
        client: str,
        operation: str,
        arguments: dict[str, Any],
        call: Callable[[], Awaitable[T]],
        told: Callable[[T], dict[str, Any] | None],
    ) -> T:
        """Make the call and record it, as `told` tells its answer. Raises what it raises, once it is recorded; a call
        that is cancelled under way is recorded as unknown."""
        start = time.monotonic()
        try:
            answer = await call()
        except StoreUnavailable as error:
            self._record(Operation(client, operation, arguments, start, time.monotonic(), None, error.code, True))
            raise
        except DurableJobsError as error:
            name = type(error).__name__
            self._record(Operation(client, operation, arguments, start, time.monotonic(), None, name))
            raise
        except BaseException as error:
            name = type(error).__name__
            self._record(Operation(client, operation, arguments, start, time.monotonic(), None, name, True))
            raise
        self._record(Operation(client, operation, arguments, start, time.monotonic(), told(answer)))
        return answer

    def _record(self, operation: Operation) -> None:
        self.operations.append(operation)
        self._file.write(json.dumps(asdict(operation)) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def read_history(path: Path) -> Iterator[Operation]:
    """What a `History` wrote."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield Operation(**json.loads(line))
