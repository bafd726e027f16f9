#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a LLaDA2.2 checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "a LLaDA2.2" llada22 llada2.2-mini 8905 131072 "$@"
