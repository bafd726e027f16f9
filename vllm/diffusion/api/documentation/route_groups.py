# SPDX-License-Identifier: Apache-2.0
"""Groups, order and summaries of the routes in the page at `/docs`."""

from __future__ import annotations

from typing import Any, NamedTuple


class Group(NamedTuple):
    """A group of routes that serve one purpose.

    Attributes:
        name: heading of the group.
        description: one sentence below it.
        routes: summary of each route by path, in the order of the page.
    """

    name: str
    description: str
    routes: dict[str, str]


GROUPS = (
    Group(
        "Ask",
        "Generate text, with the bodies of OpenAI and Anthropic or with all diffusion parameters.",
        {
            "/v1/chat/completions": "Answer a conversation (OpenAI chat completions)",
            "/v1/responses": "Answer a conversation (OpenAI responses)",
            "/v1/messages": "Answer a conversation (Anthropic messages)",
            "/v1/completions": "Continue a text (OpenAI completions)",
            "/v1/fim/completions": "Write the text between a prompt and a suffix (Inception)",
            "/v1/edit/completions": "Predict the next edit of code (Inception)",
            "/v1/apply/completions": "Merge a snippet with code (Inception)",
            "/generate": "Denoise one or more canvases, with every diffusion parameter",
            "/v1/chat/completions/batch": "Answer several conversations in one request",
            "/invocations": "Chat or completions, by the fields of the body (SageMaker)",
        },
    ),
    Group(
        "Score",
        "Measure how likely the model finds a text, choose among options, and count tokens.",
        {
            "/v1/loglikelihood": "Log likelihood of a continuation",
            "/v1/decisions": "Answer typed questions in one forward pass (OpenAI decisions)",
            "/v1/decisions/calibration": "The calibration of decisions, if there is one",
            "/v1/systemone": "Answer typed questions about a state in one forward pass",
            "/generative_scoring": "Probabilities of label tokens behind each item",
            "/tokenize": "Token ids of a text or a conversation",
            "/detokenize": "Text of token ids",
            "/v1/messages/count_tokens": "Number of tokens of a conversation (Anthropic)",
        },
    ),
    Group(
        "Watch",
        "See whether the server is ready, what it serves and how it performs.",
        {
            "/ready": "Whether the server accepts new requests",
            "/health": "Whether the engine lives",
            "/metrics": "Prometheus metrics",
            "/v1/models": "The served models",
            "/v1/models/{model_id}": "One served model",
            "/version": "Versions of vLLM and Mosaic",
            "/load": "Number of requests in progress",
        },
    ),
    Group(
        "Train",
        "Pause generation, update the weights and lend memory to a trainer; for trusted networks.",
        {
            "/pause": "Pause generation",
            "/resume": "Resume generation",
            "/is_paused": "Whether generation is paused",
            "/abort_requests": "Abort some or all requests",
            "/init_weight_transfer_engine": "Connect to the trainer",
            "/start_weight_update": "Begin an update of the weights",
            "/update_weights": "Load tensors",
            "/finish_weight_update": "End an update of the weights",
            "/update_weight_version": "Set the label of the weights",
            "/v1/load_lora_adapter": "Load a LoRA adapter",
            "/v1/unload_lora_adapter": "Unload a LoRA adapter",
            "/weight_info": "The label of the weights",
            "/weight_checker": "Compare checksums of the weights",
            "/get_world_size": "Number of processes that hold weights",
            "/sleep": "Release memory",
            "/wake_up": "Allocate released memory again",
            "/is_sleeping": "Whether memory is released",
        },
    ),
)
# This group also has all routes that no group names.
_OTHERS = Group(
    "vLLM",
    "Further routes of vLLM, as it serves them.",
    {
        "/ping": "Whether the engine lives (SageMaker)",
        "/v1/chat/completions/render": "Token ids of a conversation (OpenAI chat completions)",
        "/v1/messages/render": "Token ids of a conversation (Anthropic messages)",
        "/v1/completions/render": "Token ids of a text (OpenAI completions)",
        "/v1/responses/render": "Token ids of a conversation (OpenAI responses)",
        "/v1/chat/completions/derender": "Answer of a conversation from its token ids",
        "/v1/completions/derender": "Answer of a completion from its token ids",
        "/inference/v1/generate": "Generate from token ids",
        "/inference/v1/abort_requests": "Abort some or all requests",
        "/tokenizer_info": "Settings of the tokenizer",
        "/server_info": "Settings of the server",
        "/collective_rpc": "Call a method of all workers",
        "/reset_prefix_cache": "Forget cached prefixes",
        "/reset_mm_cache": "Forget cached images",
        "/reset_encoder_cache": "Forget cached outputs of encoders",
        "/v1/responses/{response_id}": "A stored response, if vLLM stores responses",
        "/v1/responses/{response_id}/cancel": "Cancel a response in the background",
        "/kv_event_sources": "Addresses at which the engines publish events of their KV cache",
        "/scale_elastic_ep": "Change the number of engines that share experts",
        "/is_scaling_elastic_ep": "Whether this number is changing",
    },
)


def arrange(document: dict[str, Any]) -> None:
    """Order the routes of an OpenAPI document by group, and set their summaries."""
    remaining: dict[str, Any] = document["paths"]
    document["tags"], document["paths"] = [], {}
    for group in (*GROUPS, _OTHERS):
        names = (
            list(remaining)
            if group is _OTHERS
            else [path for path in group.routes if path in remaining]
        )
        if names:
            document["tags"].append({"name": group.name, "description": group.description})
        for path in names:
            document["paths"][path] = operations = remaining.pop(path)
            for operation in operations.values():
                operation["tags"] = [group.name]
                operation["summary"] = group.routes.get(path, operation["summary"])
