# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
#
# A server without a GPU. From the root of the repository:
#   docker build -f docs/docker/cpu.Dockerfile -t mosaic:cpu .
#   docker run --rm -p 127.0.0.1:8000:8000 mosaic:cpu

FROM debian:bookworm-slim

RUN apt-get update \
  && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
  && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mosaic
ENV MOSAIC_DEVICE=cpu

# Packages first: a change of the sources does not install them anew.
COPY requirements requirements
COPY scripts scripts
COPY setup.py ./
RUN scripts/setup.sh

COPY . .
RUN useradd --create-home mosaic && mkdir -p models && chown mosaic models
USER mosaic
# The embedded default model; MODEL_DIR names another one: a folder that is mounted, or a name on the
# Hugging Face Hub.
RUN .venv/bin/python scripts/make_tiny_model.py

ENV MODEL_DIR=/opt/mosaic/models/llada-tiny HOST=0.0.0.0 PORT=8000 MAX_MODEL_LEN=4096
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
  CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["scripts/run_llada_server.sh"]
