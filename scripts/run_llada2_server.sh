#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a LLaDA2.0 or LLaDA2.1 checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "a LLaDA2.0 or LLaDA2.1" llada2 llada2.0-mini 8902 32768 "$@"
