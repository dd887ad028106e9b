"""The HTTP API, a thin adapter over the service and the client. Needs the extra `http`.

`python -m durable_jobs.http` serves it, with the settings of the environment.
"""

from durable_jobs.http.app import create_app, serve

__all__ = ["create_app", "serve"]
