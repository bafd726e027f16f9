#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve an SDAR or SDAR-MoE checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "an SDAR or SDAR-MoE" sdar sdar-8b-chat 8903 32768 "$@"
