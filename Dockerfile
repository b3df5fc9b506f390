# One target per role. Coordinator and talliers load no learning library, so their images have none but scikit-learn,
# with which a process of the coordinator chooses clusters.
#   docker build --target coordinator -t private-labeler:coordinator .
#   docker build --target embedder    -t private-labeler:embedder .
#   docker build --target agent       -t private-labeler:agent .
#   docker build --target tallier     -t private-labeler:tallier .
#   docker build -t private-labeler .                                   (every command)
#   docker run --rm -v "$PWD/out:/out" private-labeler demo --out /out/demo
# The official torch wheel runs on CPUs and on CUDA devices alike, so a CUDA image differs only in its base, which
# brings the driver's user-space libraries for the container runtime:
#   docker build --target agent --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu22.04 -t private-labeler:agent-cuda .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS base

# The CUDA base has no Python; Ubuntu 22.04 packages 3.11. The Python base already has it.
RUN command -v python3.11 >/dev/null || ( \
        apt-get update && apt-get install --yes --no-install-recommends python3.11 python3.11-venv \
        && rm -rf /var/lib/apt/lists/* )

# /data is where a role keeps its home: a volume that is made empty takes over owner and permissions from here.
RUN useradd --create-home --uid 1000 labeler && mkdir /app && chown labeler /app \
    && install --directory --owner labeler --mode 0700 /data
USER labeler
WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1
RUN python3.11 -m venv .venv && python -m pip install --quiet --no-cache-dir uv==0.13.8

# Dependencies first: they change less often than the code, so these layers are reused. Compiled here, once: a container
# starts from the image each time, and would compile what it loads at every start.
COPY --chown=labeler pyproject.toml README.md ./
COPY --chown=labeler constraints.txt ./
COPY --chown=labeler deploy/requirements.py deploy/

FROM base AS slim-dependencies
RUN python deploy/requirements.py --slim > requirements.txt \
    && uv pip install --quiet --no-cache --compile-bytecode --python .venv/bin/python -c constraints.txt -r requirements.txt

FROM base AS full-dependencies
RUN python deploy/requirements.py > requirements.txt \
    && uv pip install --quiet --no-cache --compile-bytecode --python .venv/bin/python -c constraints.txt -r requirements.txt

FROM slim-dependencies AS slim
COPY --chown=labeler labeler labeler
COPY --chown=labeler feature_store feature_store
COPY --chown=labeler api api
COPY --chown=labeler workers workers
RUN uv pip install --quiet --no-cache --compile-bytecode --no-deps --python .venv/bin/python .

FROM full-dependencies AS full
COPY --chown=labeler labeler labeler
COPY --chown=labeler feature_store feature_store
COPY --chown=labeler api api
COPY --chown=labeler workers workers
RUN uv pip install --quiet --no-cache --compile-bytecode --no-deps --python .venv/bin/python .

FROM slim AS coordinator
VOLUME /data
EXPOSE 8443
ENTRYPOINT ["labeler"]
CMD ["serve", "--home", "/data", "--host", "0.0.0.0", "--port", "8443"]

FROM slim AS tallier
VOLUME /data
ENTRYPOINT ["labeler"]
CMD ["tallier", "run", "--home", "/data"]

FROM full AS embedder
VOLUME /data
ENTRYPOINT ["labeler"]
CMD ["embedder", "--home", "/data"]

FROM full AS agent
VOLUME /data
ENTRYPOINT ["labeler"]
CMD ["agent", "run", "--home", "/data"]

FROM full
ENTRYPOINT ["labeler"]
CMD ["--help"]
