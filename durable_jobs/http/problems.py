"""How every refusal and failure is answered: problem details (RFC 9457). Never a stack, never SQL, never endless."""

import logging
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from durable_jobs.contract.errors import DurableJobsError, FieldProblem, InvalidInput, field_path
from durable_jobs.contract.rules import storable_text

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_MOST_FIELDS, _LONGEST_TEXT = 50, 500


class Unauthenticated(DurableJobsError):
    """A bearer token is needed, one that is known, not revoked and not expired."""

    code = "UNAUTHENTICATED"
    http_status = 401


class Forbidden(DurableJobsError):
    """The token does not allow this."""

    code = "FORBIDDEN"
    http_status = 403


class LoopbackOnly(DurableJobsError):
    """Without a token this machine alone is served, directly and not through a proxy or another site's page."""

    code = "LOOPBACK_ONLY"
    http_status = 403


class BadIdempotencyKey(InvalidInput):
    """The header `Idempotency-Key` must be there once, with 1 to 255 printable ASCII characters."""

    code = "BAD_IDEMPOTENCY_KEY"
    http_status = 400


class BodyTooLarge(InvalidInput):
    """The body is larger than any job may be."""

    code = "BODY_TOO_LARGE"
    http_status = 413


class NotJson(DurableJobsError):
    """The body must be JSON, of the content type application/json."""

    code = "NOT_JSON"
    http_status = 415


class FieldError(BaseModel):
    """One thing wrong with the request."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    field: str
    """A path such as `payload.items[3].price`, a header or a parameter."""
    problem: str


class Problem(BaseModel):
    """A refusal or a failure, as RFC 9457 has it."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "example": {
                "type": "urn:durable-jobs:problem:invalid-job",
                "title": "Invalid job",
                "status": 422,
                "detail": "payload.items[3].price: must be finite",
                "code": "INVALID_JOB",
                "retryable": False,
                "errors": [{"field": "payload.items[3].price", "problem": "must be finite"}],
            }
        },
    )

    type: str
    """`urn:durable-jobs:problem:` and the code."""
    title: str
    status: int
    detail: str
    code: str
    """Stable, for programs."""
    retryable: bool
    """Whether the same request may be sent again."""
    errors: list[FieldError]


def problem_response(
    code: str,
    status: int,
    detail: str,
    *,
    retryable: bool = False,
    errors: Iterable[FieldProblem] = (),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The answer. Its texts come from requests in part, hence are bounded and escaped."""
    problem = Problem(
        type=f"urn:durable-jobs:problem:{code.lower().replace('_', '-')}",
        title=code.replace("_", " ").capitalize(),
        status=status,
        detail=storable_text(detail, 4 * _LONGEST_TEXT),
        code=code,
        retryable=retryable,
        errors=[
            FieldError(
                field=storable_text(error.field, _LONGEST_TEXT), problem=storable_text(error.problem, _LONGEST_TEXT)
            )
            for error in list(errors)[:_MOST_FIELDS]
        ],
    )
    return JSONResponse(problem.model_dump(), status, headers, media_type=MEDIA_TYPE)


async def _typed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DurableJobsError)
    headers = {}
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    detail = error.message
    if error.http_status >= 500:
        # What the database says is for our log: it may quote statements, hosts and tenants' data.
        logger.warning("%s %s: %s", request.method, request.url.path, error)
        detail = str(type(error).__doc__)
        if error.retryable:
            headers["Retry-After"] = "1"
    problems = _plainly(error.problems) if isinstance(error, InvalidInput) else []
    if problems:
        detail = "; ".join(str(problem) for problem in problems[:3])
    return problem_response(
        error.code, error.http_status, detail, retryable=error.retryable, errors=problems, headers=headers
    )


def _plainly(problems: Iterable[FieldProblem]) -> list[FieldProblem]:
    """Without the words that pydantic puts before a validator's own."""
    return [FieldProblem(each.field, each.problem.removeprefix("Value error, ")) for each in problems]


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = [FieldProblem(field_path(each["loc"][1:]), each["msg"]) for each in error.errors()]
    return await _typed(request, InvalidInput(problems))


async def _plain(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    return problem_response(status.name, status, status.description or status.phrase, headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # to nobody: the client left before its request was whole


async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    # The server logs the exception itself.
    return problem_response("INTERNAL_ERROR", 500, "The request failed; the server's log says why.")


def answer_problems(app: FastAPI) -> None:
    """Answer all that goes wrong in `app` with problem details."""
    app.add_exception_handler(DurableJobsError, _typed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _plain)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unforeseen)


_DESCRIPTIONS = {
    400: "The idempotency key is missing or malformed.",
    401: "No valid bearer token.",
    403: "The token does not allow it.",
    404: "There is no such thing, or it is another tenant's or project's.",
    409: "The job's state does not allow it.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    422: "The request is malformed; `errors` name the fields.",
    503: "Postgres is away.",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these."""
    schema = {"$ref": f"#/components/schemas/{Problem.__name__}"}
    return {
        status: {"description": _DESCRIPTIONS[status], "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }
