#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make .venv, install the pinned packages and compile the native kernels; existing parts are kept.
#
# usage: scripts/setup.sh [test] [--all-gpus]
#   test          also install the packages for the tests and scripts/check
#   --all-gpus    compile for every supported GPU, even on a machine without one; otherwise for
#                 the GPU of this machine
#
# Environment: as scripts/quickstart.sh.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

for argument in "$@"; do
  case "$argument" in
    test | --all-gpus) ;;
    -h | --help) show_help "$0" && exit ;;
    *) die "unknown argument '$argument' (see --help)" ;;
  esac
done

setup "$@"
