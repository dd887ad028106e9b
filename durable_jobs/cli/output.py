"""How commands speak: lines for people, or with `--json` one JSON object on standard output, errors included."""

import json
from typing import Annotated, NoReturn

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text, on failure too.")]


def say(as_json: bool, text: str, **values: object) -> None:
    """Print `text`, or `values` as JSON; at once, for whoever reads from a pipe."""
    print(json.dumps(values) if as_json else text, flush=True)


def fail(as_json: bool, code: str, message: str, *, exit_code: int = 1, **values: object) -> NoReturn:
    """Report a failure and leave with `exit_code`."""
    if as_json:
        print(json.dumps({"error": {"code": code, "message": message, **values}}), flush=True)
    else:
        typer.echo(f"error: {message}", err=True)
    raise typer.Exit(exit_code)
