# One image for every role. The official torch wheel runs on CPUs and on CUDA devices alike, so the CUDA
# image differs only in its base, which brings the driver's user-space libraries for the container runtime.
#   docker build -t private-labeler .
#   docker build -t private-labeler:cuda --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu22.04 .
#   docker run --rm -v "$PWD/out:/out" private-labeler demo --out /out/demo
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# The CUDA base has no Python; Ubuntu 22.04 packages 3.11. The Python base already has it.
RUN command -v python3.11 >/dev/null || ( \
        apt-get update && apt-get install --yes --no-install-recommends python3.11 python3.11-venv \
        && rm -rf /var/lib/apt/lists/* )

RUN useradd --create-home labeler && mkdir /app && chown labeler /app
USER labeler
WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1

# Dependencies first: they change less often than the code, so this layer is reused.
COPY --chown=labeler pyproject.toml README.md ./
RUN python3.11 -m venv .venv \
    && python -m pip install --quiet --no-cache-dir uv==0.13.8 \
    && uv pip install --quiet --no-cache --python .venv/bin/python -r pyproject.toml

COPY --chown=labeler labeler labeler
COPY --chown=labeler feature_store feature_store
COPY --chown=labeler api api
COPY --chown=labeler workers workers
RUN uv pip install --quiet --no-cache --no-deps --python .venv/bin/python .

ENTRYPOINT ["labeler"]
CMD ["--help"]
