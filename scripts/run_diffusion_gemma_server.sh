#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a DiffusionGemma checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "a DiffusionGemma" diffusion-gemma diffusiongemma-26b-a4b-it 8908 32768 "$@"
