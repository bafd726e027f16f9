# SPDX-License-Identifier: Apache-2.0
"""Tags of edit and apply requests, and merges of snippets."""

import random
from itertools import pairwise

import pytest

from vllm.diffusion.editing.differences import Edit, applied, edits_between
from vllm.diffusion.editing.merge import is_marker, merged
from vllm.diffusion.editing.regions import Region
from vllm.diffusion.editing.tags import TagError, lines_around, read_apply, read_edit

CODE = """import os
import re

class Calculator:
    def __init__(self):
        self.history = []

    def add(self, a, b):
        result = a + b
        return result

    def clear(self):
        self.history = []
        return None
"""


@pytest.mark.parametrize(
    "line",
    [
        "// ... existing code ...\n",
        "    # ... rest of the class ...",
        "<!-- ... existing code ... -->",
        "/* ... */",
        "# ...\r\n",
        "... existing code ...",
        "-- \u2026 existing code \u2026",
        "{/* ... existing code ... */}",
    ],
)
def test_markers(line: str) -> None:
    assert is_marker(line)


@pytest.mark.parametrize("line", ["...", "    ...", "# see ... below", "x = [...]", "", "// end"])
def test_lines_that_are_no_markers(line: str) -> None:
    assert not is_marker(line)


def test_a_block_with_context_on_both_sides_is_replaced() -> None:
    snippet = """# ... existing code ...
    def add(self, a, b):
        total = a + b
        self.history.append(total)
        return total

    def clear(self):
# ... existing code ...
"""
    wanted = CODE.replace("result = a + b", "total = a + b\n        self.history.append(total)")
    assert merged(CODE, snippet) == wanted.replace("return result", "return total")


def test_blocks_at_both_ends_need_one_context() -> None:
    snippet = "import os\nimport sys\nimport re\n# ... existing code ...\n        return None\n"
    assert (
        merged(CODE, f"{snippet}\nprint(1)\n")
        == CODE.replace("import os\n", "import os\nimport sys\n") + "\nprint(1)\n"
    )
    assert merged(CODE, snippet) == CODE.replace("import os\n", "import os\nimport sys\n")


def test_brackets_close_the_part_that_a_block_is_in() -> None:
    code = "function a() {\n  one();\n}\nfunction c() {\n  three();\n}\n"
    snippet = "// ...\nfunction a() {\n  two();\n}\n// ..."
    assert merged(code, snippet) == code.replace("one", "two")
    added = "// ...\nfunction a() {\n  one();\n}\nfunction b() {\n  two();\n}\n// ..."
    assert merged(code, added) is None  # b may replace c or precede it


@pytest.mark.parametrize(
    "snippet",
    [
        "add a method multiply",  # an instruction
        "# ... existing code ...\ndef multiply(self, a, b):\n    return a * b\n# ...",
        "# ...\n        self.history = []\n        x = 1\n        return None\n# ...",  # twice
        "# ...\n    def add(self, a, b):\n        return None\n# ...",  # in another method
        "# ... existing code ...",
    ],
)
def test_places_that_are_not_certain(snippet: str) -> None:
    assert merged(CODE, snippet) is None


def test_lines_that_stay_keep_their_bytes() -> None:
    code = "a = 1  \r\nb = 2\t\r\nc = 3\r\nd = 4"
    snippet = "a = 1\nb = 5\nc = 3\n# ..."
    assert merged(code, snippet) == "a = 1\nb = 5\nc = 3\nd = 4"
    snippet = "# ...\nb = 2\nx = 0\nc = 3\n# ..."
    assert merged(code, snippet) == "a = 1  \r\nb = 2\nx = 0\nc = 3\nd = 4"


ZED = (
    "<|recently_viewed_code_snippets|>\n<|/recently_viewed_code_snippets|>\n"
    "<|current_file_content|>\ncurrent_file_path: a.py\nx = 1\n<|code_to_edit|>\n"
    "def f():\n    re<|cursor|>turn '<|cursor|>'<|/code_to_edit|>\n\ny = 2\n"
    "<|/current_file_content|>\n<|edit_diff_history|>\n<|/edit_diff_history|>\n"
)


def test_the_region_of_an_edit_and_its_cursor() -> None:
    call = read_edit(ZED)
    assert call.region == "def f():\n    return '<|cursor|>'"
    assert call.cursor == call.region.index("turn")
    assert "<|code_to_edit|>" not in call.context
    assert "def f():\n    re<|cursor|>turn" in call.context


def test_a_closing_tag_with_its_own_line() -> None:
    content = "<|code_to_edit|>\na\nb\n<|/code_to_edit|>"
    assert read_edit(content).region == "a\nb\n"
    assert read_edit(content).cursor is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no tags", "<|code_to_edit|> is missing"),
        ("<|code_to_edit|>\na", "<|/code_to_edit|> is missing"),
        (
            "<|code_to_edit|>a<|/code_to_edit|><|code_to_edit|>b<|/code_to_edit|>",
            "<|code_to_edit|> appears twice",
        ),
    ],
)
def test_faults_of_an_edit(content: str, message: str) -> None:
    with pytest.raises(TagError) as error:
        read_edit(content)
    assert str(error.value) == message


def test_the_parts_of_an_apply_request() -> None:
    content = (
        "<|original_code|>\na\n<|/original_code|>\n\n<|update_snippet|>\nb\n<|/update_snippet|>"
    )
    assert read_apply(content) == ("a", "b")
    with pytest.raises(TagError) as error:
        read_apply("<|original_code|>\na\n<|/original_code|>")
    assert str(error.value) == "<|update_snippet|> is missing"


def test_lines_around_a_cursor() -> None:
    text = "\n".join("abcdefghij")
    at = text.index("e")
    assert text[slice(*lines_around(text, at, above=2, below=3))] == "c\nd\ne\nf\ng\nh"
    assert text[slice(*lines_around(text, 0, above=2, below=0))] == "a"
    assert text[slice(*lines_around(text, len(text), above=1, below=9))] == "i\nj"


class Bytes:
    """A tokenizer whose tokens are bytes; token 256 is special."""

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, spans = list[int](), list[tuple[int, int]]()
        for at, character in enumerate(text):
            ids += character.encode()
            spans += [(at, at + 1)] * len(character.encode())
        return ids, spans

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")


def region_of(text: str, masks: int = 0, cursor: int = 0) -> Region:
    return Region.of(text, *Bytes().encode(text), [256] * masks, cursor)


def test_masks_follow_the_token_before_the_cursor() -> None:
    region = region_of("a\u00e9b", masks=2, cursor=2)
    assert region.token_ids == [97, 195, 169, 256, 256, 98]
    assert region.spans == [(0, 1), (1, 2), (1, 2), (2, 2), (2, 2), (2, 3)]
    assert region_of("ab", masks=1).token_ids == [256, 97, 98]
    assert region_of("ab", masks=1, cursor=2).token_ids == [97, 98, 256]


def test_tokens_across_a_border_are_outside() -> None:
    region = region_of("abcdef", masks=1, cursor=3)
    assert region.outside(2, 4) == [[0, 2], [5, 7]]
    assert region.outside(0, 6) == []
    wide = Region("abcdef", [1, 2, 3], [(0, 2), (2, 5), (5, 6)])
    assert wide.outside(1, 5) == [[0, 1], [2, 3]]


def revised(region: Region, new_ids: list[int]) -> str:
    """Return the text after its tokens became `new_ids`."""
    return region.revised(edits_between(region.token_ids, new_ids), Bytes())


def test_empty_masks_and_end_tokens_add_no_text() -> None:
    region = region_of("ab", masks=2, cursor=1)
    assert revised(region, [97, 256, 256, 98]) == "ab"
    assert revised(region, [97, 120, 121, 98]) == "axyb"
    assert revised(region, [97, 256, 256, 256]) == "a"
    assert revised(region, [256, 122, 256, 98]) == "zb"


def test_whole_characters_are_decoded_again() -> None:
    """The second byte of a character changes."""
    region = region_of("a\u00e9b")
    assert revised(region, [97, 195, 170, 98]) == "a\u00eab"


def test_text_outside_edits_is_copied() -> None:
    """Random edits of random texts, with a tokenizer that would normalise the copied text."""
    rng = random.Random(3)
    tokenizer = Bytes()
    for _ in range(2000):
        text = "".join(rng.choice("ab\u00e9\r\n\t") for _ in range(rng.randint(1, 12)))
        ids, spans = tokenizer.encode(text)
        new, changed = list(ids), set[int]()
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(ids))
            if ids[at] < 128:
                new[at] = rng.choice([120, 121, 256])
                changed.add(spans[at][0])
        wanted = tokenizer.decode(new, skip_special_tokens=True)
        # A text that is spelt differently has the same tokens.
        assert revised(Region(text, ids, spans), new) == wanted
        other = text.replace("a", "A")
        kept = "".join(c for at, c in enumerate(other) if at not in changed)
        result = revised(Region(other, ids, spans), new)
        assert "".join(c for c in result if c not in "xy") == kept


def test_edits_may_insert_and_delete_tokens() -> None:
    """Random edits of random texts, at the borders of characters of one to three tokens."""
    rng, tokenizer = random.Random(4), Bytes()
    for _ in range(2000):
        text = "".join(rng.choice("ab\u00e9\u20ac\n") for _ in range(rng.randint(1, 9)))
        ids, spans = tokenizer.encode(text)
        borders = [at for at, (a, b) in enumerate(pairwise(spans)) if a != b]
        borders = [0, *(at + 1 for at in borders), len(ids)]
        places = sorted(rng.choices(borders, k=2 * rng.randint(0, 3)))
        edits = [
            Edit(start, stop, ids[start:stop], rng.choices(list(b"xyz"), k=rng.randint(0, 3)))
            for start, stop in zip(places[::2], places[1::2], strict=True)
        ]
        wanted = tokenizer.decode(applied(ids, edits), skip_special_tokens=True)
        assert Region(text, ids, spans).revised(edits, tokenizer) == wanted


def test_a_character_of_which_tokens_vanish_is_decoded_again() -> None:
    region = region_of("a\u20acb")
    edits = [Edit(2, 3, [130], []), Edit(3, 3, [], [130])]
    assert region.revised(edits, Bytes()) == "a\u20acb"
    assert region.revised([Edit(1, 4, region.token_ids[1:4], [195, 169])], Bytes()) == "a\u00e9b"
    assert region.revised([Edit(4, 4, [], [120])], Bytes()) == "a\u20acxb"
    assert (
        region_of("\u20ac").revised([Edit(0, 1, [226], [226]), Edit(2, 3, [172], [173])], Bytes())
        == "\u20ad"
    )
    assert (
        region.revised(
            [Edit(1, 2, [226], [240, 159]), Edit(2, 3, [130], [152, 128]), Edit(3, 4, [172], [])],
            Bytes(),
        )
        == "a\U0001f600b"
    )
