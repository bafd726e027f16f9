#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a Fast-dLLM v2 checkpoint over HTTP.
#
# usage: scripts/run_fast_dllm_server.sh [server arguments]
#
# Environment:
#   MODEL_DIR                        the checkpoint, a folder or a name on the Hugging Face Hub;
#                                    wins over the two below
#   FAST_DLLM_MODEL_DIR              the same
#   MOSAIC_MODEL_ROOT                folder that holds fast-dllm-v2-7b
#                                    (default $MOSAIC_HOME/models)
#   MOSAIC_HOME                      this repository (default: where this script lies)
#   HOST, PORT                       default 127.0.0.1 and 8904
#   MAX_MODEL_LEN                    prompt and canvas together, in tokens (default 32768)
#   GPU_MEMORY_UTILIZATION           share of the GPU's memory (default 0.92)
#   CUDA_VISIBLE_DEVICES             the GPUs to use (default: as the driver gives them)
#   VLLM_ALLOW_LONG_MAX_MODEL_LEN    1 unless set: lengths above the checkpoint's own are allowed
#   EXTRA_VLLM_ARGS                  more server arguments, quoted as in a shell

case "${1:-}" in
  -h | --help)
    sed -n '3,/^$/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family fast-dllm fast-dllm-v2-7b 8904 32768 "$@"
