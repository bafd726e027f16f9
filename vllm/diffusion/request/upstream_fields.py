# SPDX-License-Identifier: Apache-2.0
"""What each field of OpenAI's, Anthropic's and vLLM's requests does here.

Fields that are also ours, such as `temperature`, are in `vllm.diffusion.request.fields`. A test
compares the table with the bodies of upstream's routes.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm.diffusion.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class UpstreamField:
    """A request field of another API.

    Attributes:
        name: name in requests.
        effect: what happens to it:

            - "acts": the route's handler, ours or upstream's, reads it.
            - "renamed": it is another name of the field `replaced_by`.
            - "thinking": it acts if the chat template can turn thinking on or off, and is ignored
              otherwise.
            - "ignored": accepted without effect; the report of an answer lists it.
            - "unlisted": accepted without effect; it requests nothing that the model does.
            - "refused": HTTP 400.
        neutral: values of a refused or ignored field that request nothing.
        refusal: text of the refusal; empty if the name is refused as unknown.
        in_sampling: whether upstream's `SamplingParams` has it. Such a field is refused on every
            route.
        replaced_by: field that has its effect.
    """

    name: str
    effect: Literal["acts", "renamed", "thinking", "ignored", "unlisted", "refused"]
    neutral: tuple[Any, ...] = ()
    refusal: str = ""
    in_sampling: bool = False
    replaced_by: str | None = None

    @property
    def is_ignored(self) -> bool:
        """Whether the field may have no effect, of which the report informs the client."""
        return self.effect in ("ignored", "thinking")


def _refused(name: str, wanted: str, *neutral: Any, in_sampling: bool = False) -> UpstreamField:
    return UpstreamField(name, "refused", neutral, f"wanted {wanted}", in_sampling)


def _ignored(name: str, *neutral: Any, replaced_by: str | None = None) -> UpstreamField:
    return UpstreamField(name, "ignored", neutral, replaced_by=replaced_by)


_ACTS = (
    # Model and prompt.
    *("model", "messages", "prompt", "input", "instructions", "system", "chat_template"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
    *("add_special_tokens", "echo", "truncate_prompt_tokens", "truncation_side", "truncation"),
    *("previous_response_id", "previous_input_messages"),
    # The answer.
    *("n", "stop", "stop_sequences", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens", "response_format", "text"),
    *("structured_outputs", "output_config", "tools", "tool_choice", "max_tool_calls", "thinking"),
    *("logprobs", "top_logprobs", "logprob_token_ids", "include", "include_reasoning"),
    # What an answer contains, and how it is sent.
    *("stream", "stream_options", "stream_interval", "background", "enable_response_messages"),
    *("return_token_ids", "return_tokens_as_token_ids", "return_token_offsets"),
    *("return_prompt_text", "request_id", "session_id", "vllm_xargs"),
    # Upstream's handlers read them for every model; a diffusion model gives them nothing to do.
    *("user", "parallel_tool_calls", "cache_salt", "guided_decoding_backend"),
    *("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs"),
    "routed_experts_prompt_start",
)

UPSTREAM_FIELDS: dict[str, UpstreamField] = {
    field.name: field
    for field in (
        _refused(
            "prompt_logprobs", "none: prompt tokens are given, not predicted", in_sampling=True
        ),
        _refused("repetition_detection", "none: not supported", in_sampling=True),
        _refused("watermarking", "false: not supported", False, in_sampling=True),
        _refused("use_beam_search", "false: not supported", False),
        # Upstream labels a token by when it was delivered; a canvas commits tokens earlier.
        _refused(
            "return_weight_versions",
            "false: a trajectory (return_trajectory) has the weights of every step",
            False,
        ),
        _refused("prompt_embeds", "none: not supported"),
        # Upstream makes them keys of `SamplingParams.extra_args`, which are checked later.
        UpstreamField("kv_transfer_params", "refused"),
        UpstreamField("ec_transfer_params", "refused"),
        UpstreamField("reasoning_effort", "thinking", ("none",)),
        UpstreamField("reasoning", "thinking"),
        _ignored("length_penalty", 1.0),
        _ignored("early_stopping", False),
        _ignored("best_of", 1),
        _ignored("modalities", ["text"]),
        _ignored("functions", [], replaced_by="tools"),
        _ignored("function_call", "none", replaced_by="tool_choice"),
        _ignored("guided_json", replaced_by="structured_outputs.json"),
        _ignored("guided_regex", replaced_by="structured_outputs.regex"),
        _ignored("guided_choice", replaced_by="structured_outputs.choice"),
        UpstreamField("metadata", "unlisted"),
        UpstreamField("prompt_cache_key", "unlisted"),
        UpstreamField("prompt_cache_options", "unlisted"),
        UpstreamField("prompt_cache_retention", "unlisted"),
        UpstreamField("safety_identifier", "unlisted"),
        UpstreamField("service_tier", "unlisted"),
        UpstreamField("store", "unlisted"),
        UpstreamField("max_completion_tokens", "renamed", replaced_by="max_tokens"),
        UpstreamField("max_output_tokens", "renamed", replaced_by="max_tokens"),
        UpstreamField("suffix", "renamed", replaced_by="suffix_ids"),
        *(UpstreamField(name, "acts") for name in _ACTS),
    )
}


def refuse_unsupported(given: Mapping[str, Any], *, in_sampling: bool = False) -> None:
    """Refuse fields that are not supported.

    Args:
        given: values by name.
        in_sampling: consider only fields of upstream's `SamplingParams`.

    Raises:
        InvalidParameterError: naming the first unsupported field.
    """
    for name, field in UPSTREAM_FIELDS.items():
        is_considered = bool(field.refusal) and (field.in_sampling or not in_sampling)
        if is_considered and given.get(name) not in (None, *field.neutral):
            raise InvalidParameterError(name, given[name], field.refusal)
