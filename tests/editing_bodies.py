# SPDX-License-Identifier: Apache-2.0
"""Bodies of edit and apply requests in the form that clients send them."""

from typing import Any

BEFORE = "import os\n\n"
REGION = (
    "def area(width, height):\n"
    "    return width * height\n"
    "\n"
    "\n"
    "def volume(width, height, depth):\n"
    "    return area(width, height) * de\n"
    "\n"
    "\n"
    "def cost(price, number):\n"
    "    return price * number\n"
    "\n"
    "\n"
    "def total(prices):\n"
    "    return sum(prices)"
)
AFTER = "\n\nprint(volume(1, 2, 3))\n"
CURSOR = REGION.index("* de") + len("* de")
FIRST_LINE, END_LINE = 3, 11  # lines [3, 11) of the region may change


def zed(region: str = REGION, cursor: int = CURSOR) -> dict[str, Any]:
    """Return a body of Zed: one message, no limit, and no line feed before the closing tag."""
    content = (
        "<|recently_viewed_code_snippets|>\n"
        "<|recently_viewed_code_snippet|>\n"
        "code_snippet_file_path: shop/prices.py\n"
        "PRICES = {}\n"
        "<|/recently_viewed_code_snippet|>\n"
        "<|/recently_viewed_code_snippets|>\n"
        "<|current_file_content|>\n"
        "current_file_path: shop/boxes.py\n"
        f"{BEFORE}<|code_to_edit|>\n"
        f"{region[:cursor]}<|cursor|>{region[cursor:]}<|/code_to_edit|>\n"
        f"{AFTER}<|/current_file_content|>\n"
        "<|edit_diff_history|>\n"
        "--- a/shop/boxes.py\n+++ b/shop/boxes.py\n@@ -1,1 +1,1 @@\n-import sys\n+import os\n\n"
        "<|/edit_diff_history|>\n"
    )
    return {"messages": [{"role": "user", "content": content}], "stream": False}


def continue_dev(region: str = REGION, cursor: int = CURSOR) -> dict[str, Any]:
    """Return a body of continue.dev: a system message, a stream, tags with lines of their own."""
    content = (
        "<|recently_viewed_code_snippets|>\n\n<|/recently_viewed_code_snippets|>\n\n"
        "<|current_file_content|>\ncurrent_file_path: shop/boxes.py\n"
        f"{BEFORE}<|code_to_edit|>\n"
        f"{region[:cursor]}<|cursor|>{region[cursor:]}\n<|/code_to_edit|>{AFTER}\n"
        "<|/current_file_content|>\n\n<|edit_diff_history|>\n\n<|/edit_diff_history|>"
    )
    return {
        "messages": [
            {"role": "system", "content": "You edit code."},
            {"role": "user", "content": content},
        ],
        "max_tokens": 1024,
        "temperature": 0,
        "presence_penalty": 1.5,
        "stop": ["<|endoftext|>"],
        "stream": True,
    }


def zeds_region(content: str) -> str:
    """Return the region as Zed reads it from an answer."""
    return content.removeprefix("```\n").removesuffix("\n```")


def continues_region(content: str) -> str:
    """Return the region as continue.dev reads it from an answer."""
    return content[content.index("```\n") + 4 : content.rindex("\n\n```")]


def applying(original: str, snippet: str, **fields: Any) -> dict[str, Any]:
    content = (
        f"<|original_code|>\n{original}\n<|/original_code|>\n\n"
        f"<|update_snippet|>\n{snippet}\n<|/update_snippet|>"
    )
    return {"messages": [{"role": "user", "content": content}], **fields}
