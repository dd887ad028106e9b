"""Who asks, and what they may: bearer tokens with a role, an organization and projects; or one local operator."""

import secrets
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit
from uuid import UUID

from fastapi import Depends, Request

from durable_jobs.contract.errors import InvalidInput, JobNotFound
from durable_jobs.contract.models import ApiToken, Job, JobHead, TokenRole
from durable_jobs.http.problems import Forbidden, LoopbackOnly, Unauthenticated
from durable_jobs.http.state import Api, api_of
from durable_jobs.settings import Settings, is_loopback


@dataclass(frozen=True)
class Principal:
    """On whose behalf a request acts."""

    role: TokenRole
    organization: str
    projects: tuple[str, ...] | None
    """None: every project of the organization."""
    default_project: str | None
    """That of what names none."""
    tenant: str
    actor: str

    @classmethod
    def of_token(cls, token: ApiToken) -> "Principal":
        projects = None if token.projects is None else tuple(token.projects)
        return cls(
            role=token.role,
            organization=token.organization_id,
            projects=projects,
            default_project=projects[0] if projects and len(projects) == 1 else None,
            tenant=token.tenant,
            actor=token.actor,
        )

    @classmethod
    def local(cls, settings: Settings) -> "Principal":
        """The operator of an API without tokens."""
        organization = settings.local_organization
        return cls(TokenRole.OPERATOR, organization, None, settings.local_project, organization, "local")

    def require_role(self, role: TokenRole) -> None:
        """Raises `Forbidden`."""
        if not self.role.includes(role):
            raise Forbidden(f"this needs a token with the role {role}, not {self.role}")

    def project(self, named: str | None) -> str:
        """The one project of a request that names this one, or none. Raises `Forbidden`, `InvalidInput`."""
        project = named or self.default_project
        if project is None:
            raise InvalidInput.at("project", "must be given: the token is not that of one project alone")
        self.require_project(project)
        return project

    def require_project(self, project: str) -> None:
        if self.projects is not None and project not in self.projects:
            raise Forbidden(f"the token is not for project {project!r}")

    def within(self, named: str | None) -> tuple[str | None, ...]:
        """The projects that a request looks at which names this one, or none; None is all. Raises `Forbidden`."""
        if named is not None:
            self.require_project(named)
            return (named,)
        return (None,) if self.projects is None else self.projects

    def require_whole_organization(self) -> None:
        """For what is not told apart by project."""
        if self.projects is not None:
            raise Forbidden("this concerns every project of the organization, the token does not")

    def sees(self, job: JobHead) -> bool:
        return job.organization_id == self.organization and (self.projects is None or job.project_id in self.projects)


async def principal_of(request: Request) -> Principal:
    """The principal that `admit` found."""
    principal: Principal = request.state.principal
    return principal


Who = Annotated[Principal, Depends(principal_of)]


async def admit(request: Request, role: TokenRole) -> Principal:
    """Raises `Unauthenticated`, `Forbidden`, or `LoopbackOnly`."""
    api = api_of(request)
    if api.settings.http_tokens == "off":
        require_loopback(request)
        principal = Principal.local(api.settings)
    else:
        token = await api.service.find_token(_bearer(request))
        if token is None:
            raise Unauthenticated
        principal = Principal.of_token(token)
    principal.require_role(role)
    return principal


def _bearer(request: Request) -> str:
    given = request.headers.getlist("authorization")
    scheme, _, secret = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not secret.strip():
        raise Unauthenticated
    return secret.strip()


def require_loopback(request: Request) -> None:
    """Only this machine's own programs. Raises `LoopbackOnly`.

    A proxy on this machine would let the world in, a name that resolves to 127.0.0.1 any web page: hence a request that
    was forwarded, is addressed to another name, or comes from another site's page is refused as well.
    """
    headers = request.headers
    host, origin = headers.get("host", ""), headers.get("origin")
    forwarded = any(name in headers for name in ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip"))
    foreign = origin is not None and origin.partition("://")[2] != host
    near = request.client is not None and is_loopback(request.client.host) and is_loopback(_name_in(host))
    if forwarded or foreign or not near:
        raise LoopbackOnly


def _name_in(host: str) -> str:
    """The name or address of a `Host` header, which may carry a port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def require_scraper(request: Request) -> None:
    """Metrics tell of every organization, so no token of one opens them. Raises as `admit` does."""
    expected = api_of(request).settings.metrics_token
    if expected is None:
        require_loopback(request)
    elif not secrets.compare_digest(_bearer(request).encode(), expected.get_secret_value().encode()):
        raise Unauthenticated


async def visible_job(api: Api, who: Principal, job_id: UUID) -> Job:
    """Raises `JobNotFound`, for another organization's or project's job as for none."""
    job = await api.service.get_job(job_id, organization=who.organization)
    if not who.sees(job):
        raise JobNotFound(f"no job {job_id}")
    return job
