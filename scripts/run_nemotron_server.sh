#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a Nemotron-Labs-Diffusion checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "a Nemotron-Labs-Diffusion" nemotron nemotron-labs-diffusion-8b 8906 131072 "$@"
