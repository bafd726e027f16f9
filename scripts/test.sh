#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up and run the tests. Without a GPU, the tests that need one are left out.
#
# usage: scripts/test.sh [--fast | --gpu] [pytest arguments]
#   scripts/test.sh                     all tests; without a GPU in several processes
#   scripts/test.sh --fast              without the tests that tests/durations.json lists as slow
#   scripts/test.sh --gpu               tests that need a GPU, several at a time (scripts/gpu_tests.sh)
#   scripts/test.sh tests/test_docs.py  one file
#   scripts/test.sh -k parity -x        pytest's own options
#
# Environment: as scripts/quickstart.sh.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
  -h | --help) show_help "$0" && exit ;;
esac

unset PYTHONDONTWRITEBYTECODE # otherwise dozens of processes would compile all modules again
setup test
if [ "${1:-}" = --gpu ]; then
  shift
  PYTHON=$PY exec "$ROOT/scripts/gpu_tests.sh" "$@"
fi
make_tiny_model
cd "$ROOT"

# count_processes: print one more than the cores, because tests also wait for servers, but at most
# 8. With the servers that it starts, a process takes up to 4 GiB.
count_processes() {
  local limit memory processes
  memory=$(free -g 2>/dev/null | awk '/^Mem/ { print $7 }') || true # GiB available
  processes=$(($(nproc) + 1))
  for limit in 8 $((${memory:-8} / 4)); do
    [ "$processes" -le "$limit" ] || processes=$limit
  done
  echo $((processes > 0 ? processes : 1))
}

options=()
if [ "${1:-}" = --fast ]; then
  shift
  options+=(-m 'not slow')
fi
if [ $# -eq 0 ] && [ "$(device_kind)" = cpu ]; then
  # The tests of a module share an engine or a server, so they stay in one process, and modules keep
  # the order of tests/conftest.py.
  options+=(-n "$(count_processes)" --dist loadfile --no-loadscope-reorder)
fi
exec "$PY" -m pytest "${options[@]}" "$@"
