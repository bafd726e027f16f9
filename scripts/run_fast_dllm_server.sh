#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a Fast-dLLM v2 checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "a Fast-dLLM v2" fast-dllm fast-dllm-v2-7b 8904 32768 "$@"
