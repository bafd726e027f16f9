#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that documents, docstrings and comments are written in plain English.

    scripts/prose.py            all documents and Python sources
    scripts/prose.py FILE...    these files

Prints `file:line: "words": advice` for each finding; then the exit status is 1. Code blocks, inline
code, quotations, commands and names of arguments are not checked.
"""

import ast
import io
import math
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vllm", "vllm_add_llada", "flash_sample", "gather_gemm", "vmm_allocator")
CHECKED = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md"),
    *(f"{folder}/**/*.py" for folder in (*PACKAGES, "scripts", "benchmarks", "tests")),
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MAX_WORDS = 40  # words of a sentence in a document
QUOTED = r"`[^`]*`|\"[^\"]{1,80}\""
# In docstrings: commands with options, and names of arguments or of parts in a list.
COMMANDS = r"^.*(?: --\w|\[--\w|\.py ).*$|^ +\S+(?=:| {2})"

ADVICE = {  # words to avoid, and what to write instead
    r"(?<!who\s)\b(wants|wanted|knows|knew)\b": "a program requires, expects or has something",
    r"(?<!who\s)\b(sees|hears|says)\b": "a program receives, reads or states something",
    r"\b(tells?|told|telling)\b": "write return, report, log or send",
    r"\blets\b(?!\s+you\b)|\A\s*Let\b": "write allow or make, or name the action",
    r"\bwhat\s+(is|was|are|were|there|comes|begins|follows|stands)\b": "name the thing",
    r"\bthose\s+(that|which|who|whose|with|without)\b|\bThose\s+of\b": "repeat the noun",
    r"\bbeside\b": "write with, next to or in addition to",
    r"\banew\b": "write again",
    r"\bnewest\b": "write latest",
    r"\bas\s+far\s+as\b": "write if, up to or when available",
    r"(?<!(?:twice|times)\s)(?<!alf\s)\b(so|as)\s+many\b(?![^.;]*\s(as|that)\b)": "name the number",
    r"\bstands?\b(?!-)": "write is or appears",
    r"\bstandstills?\b": "write pause",
    r"\bguess(es|ed)?\b": "write draft",
}
HALF_SENTENCE = r"\A((by|in) )?(of|that|which|as|where|whose|those)\b"
COMMENT_ADVICE = ADVICE | {HALF_SENTENCE: "begin with a noun: rows per tile"}


class Text(NamedTuple):
    """A paragraph of a document, a docstring or a comment."""

    line: int
    text: str
    advice: dict[str, str] = ADVICE
    max_words: float = math.inf


def without(pattern: str, text: str) -> str:
    """Put quotes in place of each match, with its number of lines."""
    return re.sub(pattern, lambda match: "``" + "\n" * match[0].count("\n"), text, flags=re.M)


def document_texts(source: str) -> Iterator[Text]:
    line, prose = 1, without(r"^ *```(?s:.*?)^ *```", source)
    # A list item, a heading, a row of a table or an empty line begins a new text.
    for text in re.split(r"\n(?=\s*(?:[-*|#]|\d+\.\s|$))", prose, flags=re.M):
        yield Text(line, without(QUOTED, text), max_words=MAX_WORDS)
        line += text.count("\n") + 1


def python_texts(source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            yield Text(node.body[0].lineno, without(f"{COMMANDS}|{QUOTED}", text))
    comments: list[Text] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("#: ")
            end = comments[-1].line + comments[-1].text.count("\n") if comments else -1
            if end == line - 1 and token.line.lstrip().startswith("#"):
                before = comments.pop()
                line, text = before.line, f"{before.text}\n{text}"
            comments.append(Text(line, without(QUOTED, text), COMMENT_ADVICE))
    yield from comments


def findings(text: Text) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the words and the advice of each finding."""
    for pattern, advice in text.advice.items():
        for hit in re.finditer(pattern, text.text):
            yield text.line + text.text[: hit.start()].count("\n"), hit[0], advice
    for hit in re.finditer(r"[^\s.!?|][^|]*?(?=[.!?]\W*\s|\||\Z)", text.text):
        words = [word for word in hit[0].split() if re.search(r"\w|``", word)]
        if len(words) > text.max_words:
            line = text.line + text.text[: hit.start()].count("\n")
            advice = f"{len(words)} words: split the sentence (at most {text.max_words} words)"
            yield line, " ".join(words[:5]), advice


def main(arguments: list[str]) -> int:
    paths = [Path(name) for name in arguments]
    paths = paths or sorted(path for pattern in CHECKED for path in ROOT.glob(pattern))
    status = 0
    for path in paths:
        texts = document_texts if path.suffix == ".md" else python_texts
        for text in texts(path.read_text(encoding="utf-8")):
            for line, words, advice in findings(text):
                print(f'{os.path.relpath(path)}:{line}: "{" ".join(words.split())}": {advice}')
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
