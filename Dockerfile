# The library with its API and its command line, and the application; a product's image has its own in place of that.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY durable_jobs ./durable_jobs
RUN pip install --no-cache-dir -c constraints.txt build hatchling \
    && python -m build --wheel --outdir /wheels .

FROM python:3.11-slim
# What shuts in an agent's program.
RUN apt-get update && apt-get install -y --no-install-recommends libseccomp2 && rm -rf /var/lib/apt/lists/*
ENV PYTHONUNBUFFERED=1
WORKDIR /app
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/*.whl)[app,cli,http]" \
    && rm -rf /wheels /tmp/constraints.txt \
    && useradd --system --uid 10001 --no-create-home durable-jobs
COPY activities ./activities
COPY workflows ./workflows
COPY examples ./examples
COPY worker.py ./
# The user below may write no bytecode, and Temporal's sandbox would compile the workflows' modules for each run.
RUN python -m compileall -q activities workflows examples worker.py
USER 10001
ENTRYPOINT ["durable-jobs"]
CMD ["--help"]
