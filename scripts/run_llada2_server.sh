#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a LLaDA2.0 or LLaDA2.1 checkpoint over HTTP.
#
# usage: scripts/run_llada2_server.sh [server arguments]
#
# Environment:
#   MODEL_DIR                        the checkpoint, a folder or a name on the Hugging Face Hub;
#                                    wins over the two below
#   LLADA2_MODEL_DIR                 the same
#   MOSAIC_MODEL_ROOT                folder that holds llada2.0-mini
#                                    (default $MOSAIC_HOME/models)
#   MOSAIC_HOME                      this repository (default: where this script lies)
#   HOST, PORT                       default 127.0.0.1 and 8902
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
serve_family llada2 llada2.0-mini 8902 32768 "$@"
