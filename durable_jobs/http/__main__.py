"""`python -m durable_jobs.http`: the API, with the settings of the environment."""

import sys

from durable_jobs.http.app import serve
from durable_jobs.settings import InvalidSettings, Settings

try:
    serve(Settings.from_environment())
except InvalidSettings as error:
    sys.exit(f"error: {error}")
