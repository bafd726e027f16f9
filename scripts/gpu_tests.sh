#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests that need a GPU, several at a time on one GPU, and then the tests marked `alone`.
#
# usage: scripts/gpu_tests.sh [pytest options]
#
# This needs no set-up step (scripts/test.sh --gpu has one) and no model, only a Python with vLLM,
# pytest and pytest-xdist.
#
# Environment:
#   PYTHON                  the interpreter (default: the one of .venv, else python3)

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
  -h | --help) show_help "$0" && exit ;;
esac

[ -x "$PY" ] || PY=python3
cd "$ROOT"

failed=''
# run_tests MARKERS [pytest arguments]: run tests; a failure is recorded for the exit status.
run_tests() {
  "${PYTHON:-$PY}" -m pytest --require-gpu -m "$@" || failed=yes
}

# files_with MARKER: print the files with such tests. Importing all others would take half a minute.
files_with() { grep -rlE --include='test_*.py' "mark\.$1\b" tests | sort; }

# Each process may use 6 GiB of the card. tests/conftest.py decides which tests share a process and
# puts the longest first; xdist keeps that order.
processes=$(($(nproc) < 14 ? $(nproc) : 14))
# By default an engine plans with all memory that it finds free, so limit it.
mapfile -t files < <(files_with gpu)
VLLM_ACTIVATION_POOL_SIZE_BYTES=$((4 << 30)) run_tests 'gpu and not alone' \
  -n "$processes" --no-loadscope-reorder "${files[@]}" "$@"
mapfile -t files < <(files_with alone)
run_tests 'gpu and alone' "${files[@]}" "$@"
[ -z "$failed" ]
