# One target per role, of two images' content: coordinator and talliers load no learning library, so theirs has none but
# scikit-learn, with which a process of the coordinator chooses clusters; agent and embedder share the other.
#   docker build --target coordinator -t private-labeler:coordinator .
#   docker build --target tallier     -t private-labeler:tallier .
#   docker build --target agent       -t private-labeler:agent .
#   docker build --target embedder    -t private-labeler:embedder .
#   docker build --target redis       -t private-labeler:redis .
#   docker build -t private-labeler .                                   (every command)
#   docker run --rm -v "$PWD/out:/out" private-labeler demo --out /out/demo
# podman builds and runs them as well, also where no image registry can be reached (docs/containers.md): BASE may be any
# image of Debian 12 or Ubuntu 22.04 or later.
# The official torch wheel brings CUDA with it, so one slim image serves CPUs and GPUs, without an image of NVIDIA's below
# it: a container runtime with NVIDIA's hook adds the driver (--gpus all), and reads from NVIDIA_VISIBLE_DEVICES and
# NVIDIA_DRIVER_CAPABILITIES what to add.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS base
RUN command -v python3.11 >/dev/null || ( \
        apt-get update -qq && apt-get install -qq --yes --no-install-recommends python3.11 python3.11-venv ca-certificates \
        && apt-get clean && rm -rf /var/lib/apt/lists/* )
# Programs belong to root and are read by everybody, so whoever takes over a role's process cannot change them. /data is
# where a role keeps its home, /run/labeler-redis where Redis has its socket: a volume that is made empty takes over owner
# and permissions from here.
RUN useradd --create-home --uid 1000 labeler && install --directory --owner labeler --mode 0700 /data /cache /run/labeler-redis \
    && python3.11 -m venv /opt/labeler && /opt/labeler/bin/pip install --quiet --no-cache-dir uv==0.13.8
ENV PATH=/opt/labeler/bin:$PATH PYTHONUNBUFFERED=1 UV_LINK_MODE=copy
WORKDIR /home/labeler

FROM base AS wheel
COPY . /source
RUN uv build --quiet --wheel --out-dir /dist /source

FROM base AS requirements
COPY pyproject.toml constraints.txt /source/
COPY deploy/requirements.py /source/deploy/
RUN cd /source && python deploy/requirements.py > full.txt && python deploy/requirements.py --slim > slim.txt

# Dependencies first: they change less often than the code, so their layers are reused. Compiled here, once: a container
# starts from the image each time, and would compile what it loads at every start.
FROM base AS slim
COPY --from=requirements /source/slim.txt /source/constraints.txt /requirements/
RUN cd /requirements && uv pip install --quiet --no-cache --compile-bytecode --python /opt/labeler/bin/python \
        --constraints constraints.txt --requirements slim.txt
COPY --from=wheel /dist /dist
RUN uv pip install --quiet --no-cache --compile-bytecode --no-deps --python /opt/labeler/bin/python /dist/*.whl
USER labeler
VOLUME /data
ENTRYPOINT ["labeler"]

FROM base AS full
COPY --from=requirements /source/full.txt /source/constraints.txt /requirements/
RUN cd /requirements && uv pip install --quiet --no-cache --compile-bytecode --python /opt/labeler/bin/python \
        --constraints constraints.txt --requirements full.txt
COPY --from=wheel /dist /dist
RUN uv pip install --quiet --no-cache --compile-bytecode --no-deps --python /opt/labeler/bin/python /dist/*.whl
USER labeler
# What is computed or fetched once and is nobody's secret: kernels compiled for a card, published weights, converted
# networks. A volume, so that
# it outlives a container, whose own files are read only.
VOLUME ["/data", "/cache"]
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ORT_DISABLE_TELEMETRY=1 CUDA_CACHE_PATH=/cache/cuda HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache
ENTRYPOINT ["labeler"]

FROM slim AS coordinator
EXPOSE 8443
CMD ["serve", "--home", "/data", "--edge", "localhost", "--edge-port", "8443", "--edge-tls", "internal"]

# In the operator's own domain: a socket for coordinator and embedder, and no port. Debian mends its version.
FROM base AS redis
RUN apt-get update -qq && apt-get install -qq --yes --no-install-recommends redis-server \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY deploy/redis.conf /etc/labeler/redis.conf
USER labeler
VOLUME /run/labeler-redis
ENTRYPOINT ["redis-server", "/etc/labeler/redis.conf"]

FROM slim AS tallier
CMD ["tallier", "run", "--home", "/data"]

FROM full AS agent
CMD ["agent", "run", "--home", "/data"]

FROM full AS embedder
CMD ["embedder", "--home", "/data"]

FROM full
CMD ["--help"]
