#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve an A2D checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "an A2D" a2d qwen3-0.6b-diffusion-mdlm 8909 32768 "$@"
