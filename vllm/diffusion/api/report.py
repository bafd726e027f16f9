# SPDX-License-Identifier: Apache-2.0
"""Reports about the denoising of an answer: a final report, and canvases of the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from vllm.diffusion.editing.differences import Edit, applied, unified_diff
from vllm.diffusion.request.upstream_fields import UPSTREAM_FIELDS
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.diffusion.request.params import DiffusionParams
    from vllm.outputs import CompletionOutput, RequestOutput


class DiffusionReport(BaseModel):
    """How the answers of a request were denoised; values are sums or maxima over the answers.

    Attributes:
        steps: requested number of denoising steps; null if the number is not limited.
        num_steps: denoising steps of the answers; an accepted draft adds a step without a forward
            pass.
        num_forwards: forward passes that were run.
        num_forwards_saved: forward passes that were not needed, because the answer was complete, a
            step would have committed nothing, or a draft was accepted. It is a lower bound if the
            number of steps does not determine how many tokens a step commits.
        states_drafted, states_accepted: number of drafts, and of accepted drafts.
        drafts_tried, drafts_held, cold_forwards: with `introspective`, drafts that were verified,
            drafts that were accepted, and forward passes without drafts after the first one.
        prediction_tried, prediction_held: with `predicted_text`, drafts from this text that were
            verified, and how many were accepted.
        steps_per_forward: denoising steps per forward pass.
        num_end_tokens: canvas positions from the token that ended an answer to the end of the
            canvas. They are not part of the answer; an empty answer counts all positions.
        tokens_per_forward: canvas tokens committed per forward pass.
        queue_ms, denoise_ms: longest wait, and longest time from admission to the last token.
        seeds: seed of every answer, with which it can be repeated.
        ignored: fields of the request that had no effect.
        replaced_by: for ignored fields of older versions, the field that has their effect now.
        peak_bytes, average_bytes: bytes in use in the activation pool of one GPU: the maximum over
            the steps of these answers, and the average during that step.
        budget_bytes: size of the activation pool.
        infilled: per answer, the tokens that replaced mask tokens of the prompt, by position.
        edits: per answer that revises a text, the tokens [start, stop) of the text that were
            replaced, with their ids and texts before and after.
        num_edited: tokens of these texts that differ in the answers.
        num_remasked: tokens of these texts that were masked again.
        scoring: how the tokens of these texts were scored; `none` if none may change.
        diff: per answer, the unified diff between the text and the answer, if it was requested.
        trajectories: per answer, the recorded denoising steps, if they were requested.
        batch_invariant: whether the answers have the same bits next to other requests.
        fingerprint: what that promise rests on; equal fingerprints promise equal bits.
        refreshed_early: whether an approximate cache was computed again before the request's own
            next refresh, which changes the answer.
        error: why an answer is incomplete, if one is.
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
    drafts_tried: int | None = None
    drafts_held: int | None = None
    cold_forwards: int | None = None
    prediction_tried: int | None = None
    prediction_held: int | None = None
    replaced_by: dict[str, str] | None = None
    canvas_lengths: list[int] | None = None
    infilled: list[dict[int, int]] | None = None
    edits: list[list[dict[str, Any]]] | None = None
    num_edited: int | None = None
    num_remasked: int | None = None
    scoring: str | None = None
    diff: list[str] | None = None
    trajectories: list[dict[str, Any] | None] | None = None
    batch_invariant: bool | None = None
    fingerprint: str | None = None
    refreshed_early: bool | None = None
    error: str | None = None

    @classmethod
    def of(cls, messages: Iterable[Mapping[str, Any]]) -> DiffusionReport:
        """Combine the scheduler's reports about answers; aborted answers have no report."""
        messages = list(messages)
        reports = [m for m in messages if "num_forwards" in m]
        forwards = sum(r["num_forwards"] for r in reports)
        steps = sum(r.get("num_steps", r["num_forwards"]) for r in reports)
        committed = sum(r["num_committed"] for r in reports)
        infilled = [r.get("infilled", {}) for r in reports]
        ignored = reports[0]["ignored"] if reports else []
        canvas_lengths: list[int] = max(
            (r.get("canvas_lengths", []) for r in reports), key=len, default=[]
        )
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
            drafts_tried=_sum_of(reports, "drafts_tried"),
            drafts_held=_sum_of(reports, "drafts_held"),
            cold_forwards=_sum_of(reports, "cold_forwards"),
            prediction_tried=_sum_of(reports, "prediction_tried"),
            prediction_held=_sum_of(reports, "prediction_held"),
            replaced_by=_replacements(ignored) or None,
            peak_bytes=largest.get("peak_bytes"),
            average_bytes=largest.get("average_bytes"),
            budget_bytes=largest.get("budget_bytes"),
            canvas_lengths=canvas_lengths or None,
            infilled=infilled if any(infilled) else None,
            edits=_each(reports, "edits"),
            num_edited=_sum_of(reports, "num_edited"),
            num_remasked=_sum_of(reports, "num_remasked"),
            scoring=next((r["scoring"] for r in reports if "scoring" in r), None),
            diff=_each(reports, "diff"),
            trajectories=trajectories_in(messages),
            batch_invariant=largest.get("batch_invariant"),
            fingerprint=largest.get("fingerprint"),
            refreshed_early=any(r.get("refreshed_early") for r in reports) or None,
            error=next((r["error"] for r in reports if "error" in r), None),
        )

    def content(self) -> dict[str, Any]:
        """Return the report as JSON, without optional fields that have no value."""
        return self.model_dump(exclude={n for n in _RARE if getattr(self, n) is None})


_INCOMPLETE = "\ufffd"  # replacement character that tokenizers write for an incomplete character
_MAX_CHARACTER_BYTES = 4  # maximum length of a character in UTF-8
_RARE = (
    *("replaced_by", "canvas_lengths", "infilled", "trajectories", "error"),
    *("drafts_tried", "drafts_held", "cold_forwards", "prediction_tried", "prediction_held"),
    *("edits", "num_edited", "num_remasked", "scoring", "diff"),
    *("batch_invariant", "fingerprint", "refreshed_early"),
)


def _sum_of(reports: Iterable[Mapping[str, Any]], name: str) -> int | None:
    """Return the sum of a number that only some algorithms report; None without any."""
    numbers = [report[name] for report in reports if name in report]
    return sum(numbers) if numbers else None


def _each(reports: Iterable[Mapping[str, Any]], name: str) -> list[Any] | None:
    """Return a value of each report that has it; None if none has."""
    values = [report[name] for report in reports if name in report]
    return values or None


def describe_edits(report: dict[str, Any], decided: DiffusionParams, tokenizer: Any) -> None:
    """Add the texts of the edits to the report of a revised text, and the diff if requested."""
    revision = decided.revision
    if revision is None or tokenizer is None:
        return
    edits = report["edits"]
    for edit in edits:
        edit["old"], edit["new"] = (tokenizer.decode(edit[f"{age}_ids"]) for age in ("old", "new"))
    if decided.return_diff:
        text = revision.token_ids[: revision.num_before_end(decided.stop_ids)]
        named = [Edit(*(edit[name] for name in Edit._fields)) for edit in edits]
        before, after = (tokenizer.decode(list(ids)) for ids in (text, applied(text, named)))
        report["diff"] = unified_diff(before, after)


def _replacements(ignored: Iterable[str]) -> dict[str, str]:
    """Return, for ignored fields of older APIs, the field that has their effect."""
    fields = [UPSTREAM_FIELDS[name] for name in ignored if name in UPSTREAM_FIELDS]
    return {f.name: f.replaced_by for f in fields if f.is_ignored and f.replaced_by is not None}


def trajectories_in(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any] | None] | None:
    """Return the trajectories, with null for an aborted answer, or None if there are none."""
    trajectories = [m.get("trajectory") for m in messages]
    return trajectories if any(trajectories) else None


class TokenTexts:
    """Texts of single tokens.

    Each text is decoded once, because canvases repeat tokens in every step.
    """

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
        """Return the text that each token adds to the text of the tokens before it.

        If several tokens are bytes of one character, the last one has the character. The first
        token of a prompt is decoded alone, as upstream does it.
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
            # The character includes the first token of the prompt.
            if index == len(part) - 1 and len(part) > 1:
                texts[0], texts[index] = _INCOMPLETE, whole[1:]
            part.clear()
        if part:
            texts[-1] = self._tokenizer.decode(part)
        return texts


class CanvasState(BaseModel):
    """The canvas of an answer after a denoising step; lists have one entry per position.

    Attributes:
        step: number of the step, from 1; a slow reader receives the latest step and misses others.
        token_ids: committed tokens. If `committed` is false, the latest proposal, which may still
            change, or the mask token if there is no proposal.
        text: each token as text.
        committed: whether the token is final.
        confidence: the model's probability of the token in the step that proposed it; null if
            there is no proposal.
        guessed: whether an accepted draft committed the token, without a forward pass of its own;
            absent for requests without drafts.
        entropies: on models without a mask token, the entropy of each position's distribution in
            the latest step of its canvas, in nats. There the lists end with the current canvas,
            `token_ids` has the most likely tokens, and `committed` is true for tokens that are
            final or that the step has kept.
    """

    step: int
    token_ids: list[int]
    text: list[str]
    committed: list[bool]
    confidence: list[float | None]
    guessed: list[bool] | None = None
    entropies: list[float] | None = None

    @classmethod
    def of(cls, packed: Mapping[str, Any], texts: TokenTexts) -> CanvasState:
        """Convert an `core.canvas_view.CanvasView` from its packed form."""
        token_ids = np.frombuffer(packed["token_ids"], "<i4").tolist()
        guessed, entropies = packed.get("guessed"), packed.get("entropies")
        confidence = np.frombuffer(packed["confidence"], "<f4").astype(float).round(6)
        return cls(
            step=packed["step"],
            token_ids=token_ids,
            text=texts.of(token_ids),
            committed=np.frombuffer(packed["committed"], "?").tolist(),
            confidence=[None if np.isnan(p) else p for p in confidence.tolist()],
            guessed=None if guessed is None else np.frombuffer(guessed, "?").tolist(),
            entropies=None if entropies is None else _rounded(entropies),
        )


def _rounded(packed: bytes) -> list[float]:
    numbers: list[float] = np.frombuffer(packed, "<f4").astype(float).round(6).tolist()
    return numbers


def timeout_in(message: Mapping[str, Any]) -> str | None:
    """Return the scheduler's error message if the request timed out, else None."""
    return message["error"] if "timeout_s" in message else None


def reports_by_choice(output: RequestOutput) -> dict[int, dict[str, Any]]:
    """Return the scheduler's message about each choice: a report, a canvas or an error.

    Upstream has one slot per output. It contains a list if `choices` has joined several answers in
    one output.
    """
    message = (output.kv_transfer_params or {}).get("dllm")
    if message is None:
        return {}
    if isinstance(message, list):
        return dict(enumerate(message))
    return {output.outputs[0].index: message}


def add_stop_string(report: dict[str, Any], completion: CompletionOutput, length: int) -> None:
    """Add the effect of a stop string to the report's trajectory, if it has one.

    The engine does not process stop strings. `length` is the number of the answer's tokens.
    """
    if "trajectory" in report and isinstance(completion.stop_reason, str):
        report["trajectory"] |= {"stop_length": length, "finish_reason": "stop"}
