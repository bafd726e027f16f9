# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
#
# A server on NVIDIA GPUs. From the root of the repository:
#   docker build -f docs/docker/cuda.Dockerfile -t mosaic:cuda .
#   docker run --rm --gpus all --ipc=host -p 127.0.0.1:8000:8000 \
#     -v /path/to/LLaDA-8B-Instruct:/model:ro mosaic:cuda
# Or, in place of the folder, a name on the Hugging Face Hub:
#     -e MODEL_DIR=GSAI-ML/LLaDA-8B-Instruct -e HF_TOKEN
# For another family: --entrypoint scripts/run_dream_server.sh

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
  && apt-get install -y --no-install-recommends ca-certificates python3 python3-dev python3-venv g++ \
  && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mosaic
# No GPU is needed while the image is built: nvcc compiles the native packages.
ENV MOSAIC_DEVICE=cuda

COPY . .
RUN scripts/setup.sh
RUN useradd --create-home mosaic
USER mosaic

ENV MODEL_DIR=/model HOST=0.0.0.0 PORT=8000
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
  CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["scripts/run_llada_server.sh"]
