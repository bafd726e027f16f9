# SPDX-License-Identifier: Apache-2.0
"""The model of the test server, computed by the reference."""

from functools import cache
from typing import Any

from reference.models import LLaDAReference
from transformers import PreTrainedTokenizerFast

from tests.server.process import MODEL

CLOSE = {"rel": 2e-5, "abs": 2e-5}


@cache
def model() -> LLaDAReference:
    return LLaDAReference.from_checkpoint(MODEL)


@cache
def tokenizer() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(MODEL)


def mask_id() -> int:
    return int(tokenizer().mask_token_id)
