#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make .venv, install the pinned packages and build the native rooms; what is there is kept.
#
# usage: scripts/setup.sh [test]
#   test    also what the tests and scripts/check need
#
# Environment: as scripts/quickstart.sh.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
  '' | test) ;;
  -h | --help) show_help "$0" && exit ;;
  *) die "unknown argument '$1' (see --help)" ;;
esac

setup "$@"
