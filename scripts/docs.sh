#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the documents as a site in results/site. A broken link is an error.
#
# usage: [SITE_URL=URL] [REPO_URL=URL] scripts/docs.sh
#
# With SITE_URL the site has a map for search engines, with REPO_URL a link to the repository. The
# pinned packages of requirements/docs.txt are installed in build/docs-venv.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in
  '') ;;
  -h | --help) show_help "$0" && exit ;;
  *) die "unknown argument '$1' (see --help)" ;;
esac

folder=$ROOT/build/docs-venv
if ! cmp -s "$ROOT/requirements/docs.txt" "$folder/installed.txt"; then
  "${PYTHON:-python3}" -m venv "$folder" || die "cannot create $folder: install python3-venv"
  "$folder/bin/python" "$ROOT/scripts/install_packages.py" --no-deps \
    -r "$ROOT/requirements/docs.txt" || die "mkdocs-material cannot be installed (see above)"
  cp "$ROOT/requirements/docs.txt" "$folder/installed.txt"
fi
config=$ROOT/build/mkdocs.yml
{
  printf 'INHERIT: %s\ndocs_dir: %s\nsite_dir: %s\n' "$ROOT/mkdocs.yml" "$ROOT/docs" "$ROOT/results/site"
  [ -z "${SITE_URL:-}" ] || printf 'site_url: %s\n' "$SITE_URL"
  [ -z "${REPO_URL:-}" ] || printf 'repo_url: %s\n' "$REPO_URL"
} >"$config"
cd "$ROOT" && NO_MKDOCS_2_WARNING=1 "$folder/bin/python" -m mkdocs build --strict --quiet -f "$config"
say "results/site/index.html"
