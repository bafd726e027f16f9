# SPDX-License-Identifier: Apache-2.0
"""scripts/prose.py: the wording that it reports, and its advice."""

from pathlib import Path

import pytest

from tests.programs import ROOT, run_python

LONG = (
    "The planner picks the largest chunk that fits "
    + "and then one more chunk " * 7
    + "to the end."
)


def check(file: Path, text: str) -> list[str]:
    """Return the findings in a text, each without the path of its file."""
    file.write_text(text, encoding="utf-8")
    done = run_python(ROOT / "scripts" / "prose.py", file, cwd=file.parent)
    assert done.stderr == ""
    assert done.returncode == bool(done.stdout)
    return [line.removeprefix(f"{file.name}:") for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("sentence", "words", "advice"),
    [
        ("The planner wants a pool.", "wants", "expects"),
        ("The rule sees committed tokens.", "sees", "receives"),
        ("The log is told of an error.", "told", "report"),
        ("The gate lets requests pass.", "lets", "allow"),
        ("The report has what was committed.", "what was", "noun"),
        ("Those of the last step are kept.", "Those of", "noun"),
        ("Use it beside guidance.", "beside", "with"),
        ("It is computed anew.", "anew", "again"),
        ("The newest step.", "newest", "latest"),
        ("Read as far as\npossible.", "as far as", "available"),
        ("A batch of so many rows.", "so many", "number"),
        ("The mask stands for a token.", "stands", "is"),
        ("The last guess is kept.", "guess", "draft"),
    ],
)
def test_words_to_avoid(tmp_path: Path, sentence: str, words: str, advice: str) -> None:
    [in_document] = check(tmp_path / "page.md", f"# Title\n\nFirst line.\n{sentence}\n")
    assert in_document.startswith(f'4: "{words}": ')
    assert advice in in_document.replace("name the thing", "noun")
    [in_docstring] = check(tmp_path / "a.py", f'"""First line.\n\n{sentence}\n"""\n')
    assert in_docstring == in_document.replace("4:", "3:", 1)
    comment = "# First line.\n# " + sentence.replace("\n", "\n# ")
    [in_comment] = check(tmp_path / "b.py", f"x = 1\n{comment}\n")
    assert in_comment == in_document.replace("4:", "3:", 1)


@pytest.mark.parametrize(
    "sentence",
    [
        "A reader who wants more reads the source.",
        "The page lets you watch every step.",
        "The arguments are those of `ForwardPass.run`.",
        "At least as many tiles as the GPU has multiprocessors.",
        "Half as many steps take half as many passes, and twice as many take longer.",
        "The server answers `it knows what is meant`.",
    ],
)
def test_good_sentences(tmp_path: Path, sentence: str) -> None:
    assert check(tmp_path / "page.md", f"{sentence}\n") == []
    assert check(tmp_path / "a.py", f'"""{sentence}"""\n\nx = 1  # rows per tile\n') == []


def test_sentences_of_documents_have_at_most_40_words(tmp_path: Path) -> None:
    [finding] = check(tmp_path / "page.md", f"- One.\n- A short one.\n  {LONG}\n")
    assert finding == (
        '3: "The planner picks the largest": 46 words: split the sentence (at most 40 words)'
    )
    assert check(tmp_path / "page.md", LONG.replace(" and", ". Then", 3)) == []
    assert check(tmp_path / "page.md", f"| {LONG[:120]} | {LONG[120:]} |\n") == []


def test_code_of_documents_is_not_checked(tmp_path: Path) -> None:
    text = f"One.\n\n```bash\necho `date` what is newest\n{LONG}\n```\n\nIt is anew.\n"
    [finding] = check(tmp_path / "page.md", text)
    assert finding.startswith('8: "anew"')


def test_commands_and_arguments_of_docstrings_are_not_checked(tmp_path: Path) -> None:
    lines = ("Run.", "", "    scripts/a.py anew --parts newest", "", "Args:", "    wanted: rows.")
    assert check(tmp_path / "a.py", '"""{}\n"""\n'.format("\n".join(lines))) == []


def test_a_comment_is_no_second_half_of_a_sentence(tmp_path: Path) -> None:
    text = (
        "x = 8  # of 16 experts\n# The limit of rows,\n# which a plan has.\ny = 1\n# As tested.\n"
    )
    [finding] = check(tmp_path / "a.py", text)
    assert finding == '1: "of": begin with a noun: rows per tile'
