# SPDX-License-Identifier: Apache-2.0
"""Reports of an answer's denoising: one at the end, and canvases before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.outputs import RequestOutput


class DiffusionReport(BaseModel):
    """How the answers were denoised; sums and maxima where there are several.

    Attributes:
        steps: denoise steps asked for; null where nothing bounds them.
        num_steps: denoise steps of the answers; accepted drafts let a forward serve several.
        num_forwards: forwards that were run.
        num_forwards_saved: forwards that were not, because the answer was complete, a step would
            have committed nothing, or a draft was accepted. A lower bound where the number of steps
            does not set the pace.
        states_drafted, states_accepted: drafts, and those of them that were accepted.
        steps_per_forward: steps that a forward served.
        num_end_tokens: canvas positions from the token that ended an answer on, which are no part
            of it: of an empty answer all.
        tokens_per_forward: canvas tokens committed per forward.
        queue_ms, denoise_ms: longest wait, and longest time from admission to the last token.
        seeds: seed of every answer, to repeat it.
        ignored: fields of the request that did not act.
        replaced_by: of those that are of older versions, what does the same now.
        peak_bytes, average_bytes: of the activation pool on one GPU, most in use at any time of
            the steps of these answers, and in that step on average.
        budget_bytes: of the pool.
        infilled: per answer, tokens that replaced mask tokens of the prompt, by position.
        trajectories: per answer, how it came about, where that was asked for.
        error: why an answer is not complete, where one is not.
    """

    steps: int | None
    num_steps: int
    num_forwards: int
    num_forwards_saved: int
    states_drafted: int
    states_accepted: int
    steps_per_forward: float
    num_end_tokens: int
    tokens_per_forward: float
    queue_ms: float
    denoise_ms: float
    seeds: list[int]
    ignored: list[str]
    peak_bytes: int | None = None
    average_bytes: int | None = None
    budget_bytes: int | None = None
    replaced_by: dict[str, str] | None = None
    infilled: list[dict[int, int]] | None = None
    trajectories: list[dict[str, Any] | None] | None = None
    error: str | None = None

    @classmethod
    def of(cls, messages: Iterable[Mapping[str, Any]]) -> DiffusionReport:
        """Sum up what the scheduler reported of answers; aborted ones have no report."""
        messages = list(messages)
        reports = [m for m in messages if "num_forwards" in m]
        forwards = sum(r["num_forwards"] for r in reports)
        steps = sum(r.get("num_steps", r["num_forwards"]) for r in reports)
        committed = sum(r["num_committed"] for r in reports)
        infilled = [r.get("infilled", {}) for r in reports]
        ignored = reports[0]["ignored"] if reports else []
        largest = max(reports, key=lambda r: r.get("peak_bytes", 0), default={})
        return cls(
            steps=reports[0]["steps"] if reports else None,
            num_steps=steps,
            num_forwards=forwards,
            num_forwards_saved=sum(r["num_forwards_saved"] for r in reports),
            states_drafted=sum(r.get("states_drafted", 0) for r in reports),
            states_accepted=sum(r.get("states_accepted", 0) for r in reports),
            steps_per_forward=round(steps / forwards, 3) if forwards else 0.0,
            num_end_tokens=sum(r["num_end_tokens"] for r in reports),
            tokens_per_forward=round(committed / forwards, 3) if forwards else 0.0,
            queue_ms=max((r["queue_ms"] for r in reports), default=0.0),
            denoise_ms=max((r["denoise_ms"] for r in reports), default=0.0),
            seeds=[r["seed"] for r in reports],
            ignored=ignored,
            replaced_by={n: _REPLACED_BY[n] for n in ignored if n in _REPLACED_BY} or None,
            peak_bytes=largest.get("peak_bytes"),
            average_bytes=largest.get("average_bytes"),
            budget_bytes=largest.get("budget_bytes"),
            infilled=infilled if any(infilled) else None,
            trajectories=trajectories_in(messages),
            error=next((r["error"] for r in reports if "error" in r), None),
        )

    def content(self) -> dict[str, Any]:
        """Return the report as JSON, without fields that only some answers have."""
        return self.model_dump(exclude={n for n in _RARE if getattr(self, n) is None})


_INCOMPLETE = "\ufffd"  # as which tokenizers write bytes that are no whole character
_MAX_CHARACTER_BYTES = 4  # of a character in UTF-8
_RARE = ("replaced_by", "infilled", "trajectories", "error")
_REPLACED_BY = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "functions": "tools",
    "function_call": "tool_choice",
}


def trajectories_in(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any] | None] | None:
    """Return the trajectories of answers, null for one that was aborted; None if there are none."""
    trajectories = [m.get("trajectory") for m in messages]
    return trajectories if any(trajectories) else None


class TokenTexts:
    """Texts of single tokens. Each is decoded once, as canvases repeat them in every step."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token_ids: list[int]) -> list[str]:
        unknown = list(set(token_ids) - self._known.keys())
        self._known |= zip(
            unknown, convert_ids_list_to_tokens(self._tokenizer, unknown), strict=True
        )
        return [self._known[token] for token in token_ids]

    def in_turn(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds to those before it; together they are the text.

        Of several tokens that are bytes of one character, the last one has the character. A
        prompt's first token is written alone, as upstream writes it.
        """
        texts = self.of(list(token_ids))
        part: list[int] = []
        for index, text in enumerate(texts):
            if not part and _INCOMPLETE not in text:
                continue
            part.append(token_ids[index])
            whole = self._tokenizer.decode(part)
            if _INCOMPLETE in whole and len(part) < _MAX_CHARACTER_BYTES:
                texts[index] = ""
                continue
            texts[index] = whole
            if index == len(part) - 1 and len(part) > 1:  # the first token of the prompt is in it
                texts[0], texts[index] = _INCOMPLETE, whole[1:]
            part.clear()
        if part:
            texts[-1] = self._tokenizer.decode(part)
        return texts


class CanvasState(BaseModel):
    """The canvas of an answer after a denoise step; the lists have one entry per position.

    Attributes:
        step: number of the step, from 1; a slow reader gets the newest one and misses others.
        token_ids: committed tokens; where `committed` is false the newest proposal, which may
            still change, or the mask token where there is none.
        text: each token as text.
        committed: whether the token is final.
        confidence: the model's probability of the token in the step that proposed it; null where
            there was none.
        guessed: whether an accepted draft committed the token, without a forward of its own;
            left out for requests without drafts.
    """

    step: int
    token_ids: list[int]
    text: list[str]
    committed: list[bool]
    confidence: list[float | None]
    guessed: list[bool] | None = None

    @classmethod
    def of(cls, packed: Mapping[str, Any], texts: TokenTexts) -> CanvasState:
        """Unpack an `engine.messages.CanvasView`."""
        token_ids = np.frombuffer(packed["token_ids"], "<i4").tolist()
        guessed = packed.get("guessed")
        confidence = np.frombuffer(packed["confidence"], "<f4").astype(float).round(6)
        return cls(
            step=packed["step"],
            token_ids=token_ids,
            text=texts.of(token_ids),
            committed=np.frombuffer(packed["committed"], "?").tolist(),
            confidence=[None if np.isnan(p) else p for p in confidence.tolist()],
            guessed=None if guessed is None else np.frombuffer(guessed, "?").tolist(),
        )


def timeout_in(message: Mapping[str, Any]) -> str | None:
    """Return the scheduler's error of a request whose time is over; None for others."""
    return message["error"] if "timeout_s" in message else None


def reports_by_choice(output: RequestOutput) -> dict[int, dict[str, Any]]:
    """Return the scheduler's messages in an output, by choice: a report, a canvas, an error.

    Upstream has one slot an output; where `choices` joins several answers in one output, it holds a
    list.
    """
    message = (output.kv_transfer_params or {}).get("dllm")
    if message is None:
        return {}
    if isinstance(message, list):
        return dict(enumerate(message))
    return {output.outputs[0].index: message}
