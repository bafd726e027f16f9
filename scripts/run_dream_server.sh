#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a Dream checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "a Dream" dream dream-v0-instruct-7b 8701 4096 "$@"
