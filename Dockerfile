# syntax=docker/dockerfile:1.7
# Two stages: a compiler and the sources build a virtual environment, and only that goes into the image.
# It runs as nobody in particular, writes nothing but /tmp, and needs no capability.

# The tag can move: --build-arg BASE=python:3.12.8-slim-bookworm@sha256:... pins what was looked at.
ARG BASE=python:3.12.8-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/kvindexer
WORKDIR /src
COPY deploy/constraints.txt deploy/constraints.txt
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY native native
COPY app app
# The constraints hold for the build tools as well, which pip installs by itself (PIP_CONSTRAINT).
ENV PIP_CONSTRAINT=/src/deploy/constraints.txt PIP_BUILD_CONSTRAINT=/src/deploy/constraints.txt
RUN /opt/kvindexer/bin/pip install --no-cache-dir --compile .

FROM ${BASE}
COPY --from=build /opt/kvindexer /opt/kvindexer
ENV PATH=/opt/kvindexer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/tmp/huggingface
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=15s --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/readyz', timeout=2)"]
ENTRYPOINT ["kvindexer"]
CMD ["serve", "--host", "0.0.0.0"]
