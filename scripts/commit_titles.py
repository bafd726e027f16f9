#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that titles of commits have the form `package: imperative`, with at most 72 characters.

    scripts/commit_titles.py         the last commits of the current folder's branch, without merges
    scripts/commit_titles.py FILE    the message in this file, for git's hook commit-msg

Each finding is a line `commit: "title": advice`, or `FILE:1: ...`. The exit status is 1 if there is
one.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_CHARACTERS = 72
MAX_COMMITS = 20
START = "2026-11-28T15:30:00Z"  # older commits are not checked
PACKAGES = r"[\w./-]+(?:,? [\w./-]+){0,3}: "
NOT_IMPERATIVE = (
    r"(?!(?:embed|exceed|feed|need|seed|speed|bring|focus|bias)\b)\w+(?:ed|ing|[^s]s)\b"
)
# Git writes these titles. Only the hook accepts them: `fixup!` commits are squashed later.
OF_GIT = ("Merge ", "fixup! ", "squash! ", "amend! ")


def advice_on(title: str) -> Iterator[str]:
    """Yield a sentence for each rule that a title breaks."""
    if len(title) > MAX_CHARACTERS:
        yield f"{len(title)} characters; write at most {MAX_CHARACTERS}, the rest into the body"
    if not re.match(PACKAGES + "[a-z]", title):
        yield "write `package: imperative`, as in `planner: cap chunks by the memory budget`"
    elif hit := re.match(f"{PACKAGES}({NOT_IMPERATIVE})", title):
        yield f"write an imperative such as `add` or `fix` in place of `{hit[1]}`"


def titles_of_branch() -> list[tuple[str, str]]:
    """Return the short hash and title of each commit to check."""
    # CI may run as another user than the owner of the clone.
    git = ("git", "-c", f"safe.directory={Path.cwd()}")
    options = ("--no-merges", f"--max-count={MAX_COMMITS}", f"--since={START}", "--format=%h %s")
    done = subprocess.run([*git, "log", *options], stdout=subprocess.PIPE, text=True, check=True)
    return [(line.split(" ")[0], line.partition(" ")[2]) for line in done.stdout.splitlines()]


def title_of_message(path: str) -> list[tuple[str, str]]:
    """Return the first line that is no comment, unless git wrote it."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    title = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    return [] if title.startswith(OF_GIT) else [(f"{path}:1", title)]


def main(arguments: list[str]) -> int:
    titles = title_of_message(arguments[0]) if arguments else titles_of_branch()
    findings = [
        f'{place}: "{title}": {advice}' for place, title in titles for advice in advice_on(title)
    ]
    print(*findings, sep="\n", end="\n" if findings else "")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
