#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up and run the tests. Tests that need a GPU skip themselves where there is none.
#
# usage: scripts/test.sh [--gpu] [pytest arguments]
#   scripts/test.sh                     all tests; without a GPU in two processes
#   scripts/test.sh --gpu               those that need a GPU, several at a time (scripts/gpu_tests.sh)
#   scripts/test.sh tests/test_docs.py  one file
#   scripts/test.sh -m 'not slow' -x    pytest's own options
#
# Environment: as scripts/quickstart.sh.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
  -h | --help) show_help "$0" && exit ;;
esac

unset PYTHONDONTWRITEBYTECODE # dozens of processes would compile all modules again
setup test
if [ "${1:-}" = --gpu ]; then
  shift
  PYTHON=$PY exec "$ROOT/scripts/gpu_tests.sh" "$@"
fi
make_tiny_model
cd "$ROOT"
if [ $# -eq 0 ] && [ "$(device_kind)" = cpu ]; then
  # Two whatever the cores: each takes a core, and up to 4 GiB with the servers that it starts. A
  # file stays in one process, whose engine or server its tests share; files keep their order, in
  # which the longest do not come last.
  set -- -n 2 --dist loadfile --no-loadscope-reorder
fi
exec "$PY" -m pytest "$@"
