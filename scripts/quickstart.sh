#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up, serve the tiny LLaDA model, ask it one question, print the answer, and stop.
#
# usage: scripts/quickstart.sh [--help]
#
# This works on a fresh Linux machine with Python 3.11 or later, with or without a GPU. It makes
# .venv, installs the pinned packages, compiles the native kernels if there is a GPU and nvcc, and
# trains models/llada-tiny; existing parts are kept. Then it starts the server on a free port of
# 127.0.0.1, sends one request with scripts/test_api_request.py, and stops the server. The server's
# log is in results/quickstart/server.log.
#
# Environment:
#   PYTHON                  interpreter that makes .venv (default: python3)
#   MOSAIC_DEVICE           cpu or cuda (default: cuda if nvidia-smi finds a GPU)
#   QUICKSTART_WAIT         seconds to wait for the server (default 300)
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS    as pip reads them

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
  '') ;;
  -h | --help) show_help "$0" && exit ;;
  *) die "unknown argument '$1' (see --help)" ;;
esac

LOG=$ROOT/results/quickstart/server.log
SERVER=''

# The server runs in its own process group, so that its engine can be ended with it.
stop_server() {
  [ -n "$SERVER" ] || return 0
  kill -TERM "$SERVER" 2>/dev/null || true
  for _ in $(seq 40); do
    kill -0 "$SERVER" 2>/dev/null || break
    sleep 0.5
  done
  kill -KILL -- "-$SERVER" 2>/dev/null || true
  wait "$SERVER" 2>/dev/null || true
  SERVER=''
}
trap stop_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

fail_with_log() {
  tail -n 20 "$LOG" >&2
  die "$1; the whole log is in ${LOG#"$ROOT"/}"
}

start_server() {
  local url=$1 port=$2 deadline=$((SECONDS + ${QUICKSTART_WAIT:-300}))
  mkdir -p "$(dirname "$LOG")"
  set -m
  "$PY" -m vllm.entrypoints.api_server --model "$ROOT/models/llada-tiny" --served-model-name llada-tiny \
    --host 127.0.0.1 --port "$port" >"$LOG" 2>&1 </dev/null &
  SERVER=$!
  set +m
  until is_healthy "$url"; do
    kill -0 "$SERVER" 2>/dev/null || fail_with_log "the server ended before it was ready"
    [ "$SECONDS" -lt "$deadline" ] || fail_with_log "the server was not ready in time"
    sleep 1
  done
}

setup "$@"
make_tiny_model

PORT=$(free_port)
URL=http://127.0.0.1:$PORT
QUESTION='What is the capital of France?'

say "starting the server on $URL (log: ${LOG#"$ROOT"/})"
STARTED=$SECONDS
start_server "$URL" "$PORT"
say "ready after $((SECONDS - STARTED)) s; asking: $QUESTION"

ANSWER=$("$PY" "$ROOT/scripts/test_api_request.py" --model-family llada --mask-id none \
  --host "$URL" --steps 32 --gen-length 32 --block-length 32 --prompt "$QUESTION") ||
  fail_with_log "the request failed"
printf '%s\n' "$ANSWER"
"$PY" -c 'import json, sys
answer = json.load(sys.stdin)
[text], num_ends = answer["text"], answer["diffusion"]["num_end_tokens"]
print(f"answer: {text}" if text else f"empty answer: {num_ends} end tokens")' <<<"$ANSWER"

say "stopping the server"
stop_server
say "done; to serve it with the web page: scripts/run_llada_server.sh models/llada-tiny," \
  "then open http://127.0.0.1:8901/"
