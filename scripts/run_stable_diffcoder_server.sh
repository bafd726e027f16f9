#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a Stable-DiffCoder checkpoint over HTTP. --help lists its variables.

# shellcheck source=scripts/serve.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/serve.sh"
serve_family "a Stable-DiffCoder" stable-diffcoder stable-diffcoder-8b-instruct 8907 8192 "$@"
