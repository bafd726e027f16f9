# SPDX-License-Identifier: Apache-2.0
"""Body of `POST /v1/fim/completions`: the text between a prompt and a suffix.

The form is that of Inception's API. The body is one of `/v1/completions` with other defaults.
"""

from __future__ import annotations

from typing import Any

from vllm.diffusion.api.bodies import is_whole
from vllm.diffusion.api.openai.openai_protocol import CompletionBody
from vllm.diffusion.api.schema import body_class
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.fields import BY_NAME
from vllm.diffusion.request.upstream_fields import UPSTREAM_FIELDS

DEFAULT_MAX_TOKENS, MAX_TOKENS = 512, 8192
MAX_TOP_K = 1000
DEFAULT_STOP = ("\n\n", "\n \n")
# A suffix that some clients send where nothing follows.
NO_SUFFIX = "<|endoftext|>"
# Names of the length of an answer.
_LENGTHS = frozenset(
    {
        *("max_tokens", *BY_NAME["max_tokens"].aliases),
        *("gen_length", *BY_NAME["gen_length"].aliases),
        *(name for name, field in UPSTREAM_FIELDS.items() if field.replaced_by == "max_tokens"),
    }
)


def check(body: dict[str, Any]) -> None:
    """Refuse values that Inception's API does not have.

    Raises:
        InvalidParameterError: naming the field.
    """
    prompt, suffix = body.get("prompt"), body.get("suffix")
    if not isinstance(prompt, str) or not prompt:
        raise InvalidParameterError("prompt", prompt, "wanted a string, not empty")
    if suffix is not None and not isinstance(suffix, str):
        raise InvalidParameterError("suffix", suffix, "wanted a string")
    max_tokens, top_k = body.get("max_tokens"), body.get("top_k")
    if max_tokens is not None and not is_whole(max_tokens, 1, MAX_TOKENS):
        raise InvalidParameterError("max_tokens", max_tokens, f"wanted 1 to {MAX_TOKENS}")
    if top_k is not None and top_k != -1 and not is_whole(top_k, 1, MAX_TOP_K):
        raise InvalidParameterError("top_k", top_k, f"wanted -1, or 1 to {MAX_TOP_K}")


def _read(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body in the form of `/v1/completions`."""
    body = {"stop": list(DEFAULT_STOP), **body}
    if not body.keys() & _LENGTHS:
        body["max_tokens"] = DEFAULT_MAX_TOKENS
    suffix = body.pop("suffix", "")
    # A blank suffix asks for nothing to be continued with, and no model learns from it.
    if isinstance(suffix, str) and suffix.strip() in ("", NO_SUFFIX):
        return body
    return {**body, "suffix": suffix}


FimBody = body_class(CompletionBody, "FimBody", "Body of POST /v1/fim/completions.", _read)
