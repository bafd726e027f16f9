#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a LLaDA checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "a LLaDA" llada llada-8b-instruct 8901 204800 "$@"
