"""`durable-jobs tokens …`: who may use the HTTP API."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

import typer

from durable_jobs.cli import tables
from durable_jobs.cli.connection import with_jobs
from durable_jobs.cli.jobs import Organization
from durable_jobs.cli.output import JsonOption, say
from durable_jobs.contract.models import TokenRole

app = typer.Typer(no_args_is_help=True, help="Tokens of the HTTP API.")


@app.command()
def create(
    name: Annotated[
        str, typer.Argument(help="Whose it is; the actor in the audit trail, unless --actor says another.")
    ],
    organization: Annotated[str, typer.Option()],
    role: Annotated[TokenRole, typer.Option()] = TokenRole.SUBMITTER,
    project: Annotated[
        list[str] | None, typer.Option(help="These projects alone; may be given more than once.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="By default the organization.")] = None,
    actor: Annotated[str | None, typer.Option(help="By default the token's name.")] = None,
    expires_at: Annotated[datetime | None, typer.Option(formats=["%Y-%m-%dT%H:%M:%S%z"])] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token. Its secret is printed this once, and kept as a digest only."""
    token, secret = with_jobs(
        as_json,
        lambda jobs: jobs.service.create_token(
            name, role, organization, projects=project, tenant=tenant, actor=actor, expires_at=expires_at
        ),
    )
    say(as_json, secret, secret=secret, token=token.model_dump(mode="json"))


@app.command("list")
def list_(organization: Organization = None, as_json: JsonOption = False) -> None:
    """Every token, without its secret."""
    found = with_jobs(as_json, lambda jobs: jobs.service.list_tokens(organization))
    if as_json:
        say(True, "", tokens=[each.model_dump(mode="json") for each in found])
        return
    rows = (
        (
            each.id,
            each.name,
            each.role,
            each.organization_id,
            ", ".join(each.projects or ["(all)"]),
            _state(each.revoked_at),
        )
        for each in found
    )
    tables.show(("id", "name", "role", "organization", "projects", ""), rows, empty="no tokens")


@app.command()
def revoke(token_id: Annotated[UUID, typer.Argument()], as_json: JsonOption = False) -> None:
    """Refuse a token from now on. Exits with 4 when there is no such token."""
    with_jobs(as_json, lambda jobs: jobs.service.revoke_token(token_id))
    say(as_json, f"token {token_id} is revoked", token_id=str(token_id), revoked=True)


def _state(revoked_at: datetime | None) -> str:
    return "revoked" if revoked_at else ""
