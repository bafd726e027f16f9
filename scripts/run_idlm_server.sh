#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve an I-DLM checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "an I-DLM" idlm i-dlm-8b 8920 40960 "$@"
