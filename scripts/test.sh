#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set everything up and run the tests. Tests that need a GPU skip themselves where there is none.
#
# usage: scripts/test.sh [pytest arguments]
#   scripts/test.sh                     all tests
#   scripts/test.sh tests/test_docs.py  one file
#   scripts/test.sh -m 'not slow' -x    pytest's own options
#
# Environment: as scripts/quickstart.sh.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
  -h | --help) show_help "$0" && exit ;;
esac

setup test
make_tiny_model
cd "$ROOT"
exec "$PY" -m pytest "$@"
