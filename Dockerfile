# The library with its API, its command line and the examples; a product's image adds its own handlers.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY durable_jobs ./durable_jobs
RUN pip install --no-cache-dir -c constraints.txt build hatchling \
    && python -m build --wheel --outdir /wheels .

FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/*.whl)[cli,http]" \
    && rm -rf /wheels /tmp/constraints.txt \
    && useradd --system --uid 10001 --no-create-home durable-jobs
COPY examples ./examples
USER 10001
ENTRYPOINT ["durable-jobs"]
CMD ["--help"]
