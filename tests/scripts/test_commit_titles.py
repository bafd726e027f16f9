# SPDX-License-Identifier: Apache-2.0
"""scripts/commit_titles.py checks a message for git's hook, or the commits of a clone."""

import os
from pathlib import Path

import pytest

from tests.programs import ROOT, output_of, run_python

SCRIPT = ROOT / "scripts" / "commit_titles.py"
GOOD = "planner: cap the chunk by the memory budget"
BAD = "Cap the chunk"


@pytest.mark.parametrize(
    "title",
    [
        GOOD,
        "README, CHANGELOG: embed the picture",
        "fused_ops/_linear: process 8 rows",
        "fp8 attention: bring back tiles of 64 rows",
        "Merge branch 'main' into planner, which has a long name and is merged without an edit",
        f"fixup! {GOOD}",
    ],
)
def test_good_titles_pass(tmp_path: Path, title: str) -> None:
    message = tmp_path / "message"
    message.write_text(f"# a comment\n{title}\n\n{'A line of the body may be long. ' * 9}\n")
    done = run_python(SCRIPT, message)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("title", "advice"),
    [
        ("", "package: imperative"),
        (BAD, "package: imperative"),
        ("planner: Cap the chunk", "package: imperative"),
        ("planner: caps the chunk", "in place of `caps`"),
        ("planner: capped the chunk", "in place of `capped`"),
        ("planner: capping the chunk", "in place of `capping`"),
        (f"planner: {'x' * 64}", "73 characters"),
    ],
)
def test_bad_titles_are_refused(tmp_path: Path, title: str, advice: str) -> None:
    message = tmp_path / "message"
    message.write_text(f"{title}\n")
    done = run_python(SCRIPT, message)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert done.stdout.startswith(f'{message}:1: "{title}": ')
    assert advice in done.stdout


def test_new_commits_of_a_branch(tmp_path: Path) -> None:
    """Merges are not checked, and neither are commits that are older than the rule."""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for role in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{role}_NAME": "A", f"GIT_{role}_EMAIL": "a@example.com"}

    def git(*words: str, year: int = 2027) -> str:
        dates = {"GIT_AUTHOR_DATE": f"{year}-01-02T00:00Z"}
        dates["GIT_COMMITTER_DATE"] = dates["GIT_AUTHOR_DATE"]
        return output_of("git", *words, cwd=tmp_path, env=env | dates)

    def commit(title: str, **options: int) -> None:
        git("commit", "--quiet", "--allow-empty", f"--message={title}", **options)

    git("init", "--quiet", "--initial-branch=main")
    commit(BAD, year=2026)
    git("checkout", "--quiet", "-b", "other")
    commit(GOOD)
    git("checkout", "--quiet", "main")
    git("merge", "--quiet", "--no-ff", "--message=Merge what is good", "other")
    done = run_python(SCRIPT, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    commit(BAD)
    done = run_python(SCRIPT, cwd=tmp_path, env=env)
    assert done.returncode == 1
    short_hash = git("log", "-1", "--format=%h").strip()
    assert done.stdout.startswith(f'{short_hash}: "{BAD}": write `package: imperative`')
