#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a LLaDA-MoE checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "a LLaDA-MoE" llada-moe llada-moe-7b-a1b 10001 8192 "$@"
