# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Functions that the run_<family>_server.sh scripts share: find the model, then become the server.
# Source this file and call serve_family. It needs no set-up step, only an environment that can run
# vLLM.

set -euo pipefail

refuse() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# print_usage TITLE VARIABLE DEFAULT_NAME DEFAULT_PORT DEFAULT_MAX_LEN
print_usage() {
  cat <<END
Serve $1 checkpoint over HTTP.

usage: scripts/$(basename -- "$0") [MODEL] [server arguments]

  MODEL is the checkpoint, a folder or a name on the Hugging Face Hub. Without it, the
  environment names the checkpoint.

  scripts/$(basename -- "$0") --help=Diffusion   shows Mosaic's own server arguments,
  --help=all every one, --help=max-model-len one.

Environment:
  MODEL_DIR                        the checkpoint; overrides the next two variables
$(printf '  %-32s the same' "$2")
  MOSAIC_MODEL_ROOT                folder that contains $3
                                   (default \$MOSAIC_HOME/models)
  MOSAIC_HOME                      this repository (default: the folder of this script's repository)
  HOST, PORT                       default 127.0.0.1 and $4
  MAX_MODEL_LEN                    prompt and canvas together, in tokens (default $5)
  GPU_MEMORY_UTILIZATION           share of the GPU's memory (default 0.92)
  CUDA_VISIBLE_DEVICES             the GPUs to use (default: as the driver gives them)
  VLLM_ALLOW_LONG_MAX_MODEL_LEN    1 unless set: lengths above the checkpoint's own are allowed
  EXTRA_VLLM_ARGS                  more server arguments, quoted as in a shell
END
}

# serve_family TITLE FAMILY DEFAULT_NAME DEFAULT_PORT DEFAULT_MAX_LEN [MODEL] [server arguments]
#
# The model is the argument MODEL, else $MODEL_DIR, else the family's own variable (such as
# $LLADA_MODEL_DIR), else $MOSAIC_MODEL_ROOT/DEFAULT_NAME. $PORT and $MAX_MODEL_LEN override the
# last two defaults. The server replaces the shell, so signals reach it.
serve_family() {
  local title=$1 family=$2 default_name=$3 default_port=$4 default_max_len=$5
  shift 5
  local variable=${family^^}
  variable=${variable//-/_}_MODEL_DIR
  case "${1:-}" in
    -h | --help)
      print_usage "$title" "$variable" "$default_name" "$default_port" "$default_max_len"
      exit
      ;;
  esac
  local home=${MOSAIC_HOME:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)}
  local python=$home/.venv/bin/python
  [ -x "$python" ] || python=python3
  export PYTHONPATH="$home${PYTHONPATH:+:$PYTHONPATH}"
  case "${1:-}" in
    --help=*) exec "$python" -m vllm.entrypoints.api_server "$1" ;; # needs no model
  esac

  local default=${MOSAIC_MODEL_ROOT:-$home/models}/$default_name
  local model=${MODEL_DIR:-${!variable:-$default}}
  case "${1:-}" in
    "" | -*) ;; # no model, but the first server argument
    *)
      model=$1
      shift
      ;;
  esac

  # A folder is served under its last name, and under its path, as by vLLM.
  local names=()
  [ ! -d "$model" ] || names=(--served-model-name "$(basename -- "$(realpath -s -- "$model")")" "$model")

  local tiny=$family # the family, or a similar one that has a tiny model
  case $family in
    stable-diffcoder | a2d) tiny=llada ;;
    diffusion-gemma) tiny= ;;
  esac
  [ "$model" != "$default" ] || [ -d "$model" ] || refuse "no model: the argument MODEL" \
    "is missing, MODEL_DIR and $variable are not set, and MOSAIC_MODEL_ROOT has no folder" \
    "$default; give a folder or a name on the Hugging Face Hub${tiny:+; without a download: \
.venv/bin/python scripts/make_tiny_model.py \
--family $tiny makes models/$tiny-tiny}"

  # Split as a shell would, so that a quoted JSON value stays one argument; nothing is evaluated.
  local words extra=()
  if [ -n "${EXTRA_VLLM_ARGS:-}" ]; then
    words=$("$python" -c '
import os, shlex, sys
try:
    print("\n".join(shlex.split(os.environ["EXTRA_VLLM_ARGS"])))
except ValueError as error:
    sys.exit(f"error: EXTRA_VLLM_ARGS: {error}")')
    mapfile -t extra <<<"$words"
  fi

  export VLLM_ALLOW_LONG_MAX_MODEL_LEN=${VLLM_ALLOW_LONG_MAX_MODEL_LEN:-1}

  exec "$python" -m vllm.entrypoints.api_server \
    --model "$model" --family "$family" "${names[@]}" \
    --host "${HOST:-127.0.0.1}" \
    --port "${PORT:-$default_port}" \
    --max-model-len "${MAX_MODEL_LEN:-$default_max_len}" \
    --gpu-memory-utilization "${GPU_MEMORY_UTILIZATION:-0.92}" \
    "${extra[@]}" "$@"
}
