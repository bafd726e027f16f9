# SPDX-License-Identifier: Apache-2.0
"""The LLaDA2.1 family at tiny size.

It is LLaDA2.0's network under the model type of LLaDA2.1, trained to replace wrong tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiny_model import llada2

if TYPE_CHECKING:
    from tiny_model.family import TokenIds


def config(tokens: TokenIds) -> dict[str, Any]:
    """Return the contents of config.json: LLaDA2.0-mini's keys with LLaDA2.1's model type."""
    return {**llada2.config(tokens), "model_type": "llada21_moe"}


FAMILY = replace(llada2.FAMILY, name="llada21", config=config)
