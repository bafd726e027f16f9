#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests that need a GPU, several at a time on one GPU; those marked `alone` after them.
#
# usage: scripts/gpu_tests.sh [pytest options]
#
# Needs no set-up step (scripts/test.sh --gpu has one), only a Python with vLLM, pytest and
# pytest-xdist.
#
# Environment:
#   PYTHON                  the interpreter (default: that of .venv, else python3)

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
  -h | --help) show_help "$0" && exit ;;
esac

[ -x "$PY" ] || PY=python3
cd "$ROOT"

failed=''
# run_tests MARKERS [pytest arguments]: a failure is kept for the end.
run_tests() {
  "${PYTHON:-$PY}" -m pytest --require-gpu -m "$@" || failed=yes
}

# Each process may take 6 GiB of the card. tests/conftest.py says which tests share a process; files
# keep their order, in which the longest tests do not come last.
processes=$(($(nproc) < 14 ? $(nproc) : 14))
# An engine that is not told otherwise counts on all memory that it finds free.
VLLM_ACTIVATION_POOL_SIZE_BYTES=$((4 << 30)) run_tests 'gpu and not alone' \
  -n "$processes" --no-loadscope-reorder tests "$@"
run_tests 'gpu and alone' tests "$@"
[ -z "$failed" ]
