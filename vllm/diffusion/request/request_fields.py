# SPDX-License-Identifier: Apache-2.0
"""The request fields that every algorithm may use.

`RequestFields` and `AlgorithmParams` are the only lists of request fields: validation, aliases,
defaults, HTTP schemas, `DiffusionParams` and the table of docs/requests.md are derived from them
(`vllm.diffusion.request.fields`). A new field is one attribute.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.algorithms import (
    ALGORITHM_NAMES,
    CACHES,
    GUIDED_CACHES,
    MAX_STEPS,
    REMASKING,
)
from vllm.diffusion.request.revision import (
    DEFAULT_THRESHOLD,
    MAX_ROUNDS,
    MAX_SLACK,
    read_spans,
    read_text,
)
from vllm.diffusion.request.values import MAX_FACTOR, MIN_TEMPERATURE, param

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.diffusion.request.request import Request

MAX_DRAFTS = 15  # drafts per forward pass
# Fields with which the canvas does not grow: a trajectory describes one canvas.
FIXED_WITH = (
    *("return_trajectory", "complete_blocks", "suffix_ids"),
    *("canvas_text", "canvas_token_ids"),
)
# Fields that restrict a distribution before sampling, with the values that keep all of it.
NO_FILTERS: Mapping[str, Any] = MappingProxyType({"min_p": 0.0, "top_k": None, "top_p": None})


def _cfg_scale(scale: float, request: Request) -> float:
    """Drop a server-wide default that cannot be combined with the cache."""
    return scale if request.cache in GUIDED_CACHES else 0.0


def _refused_temperature(temperature: float, request: Request) -> str | None:
    is_too_low = 0 < temperature < MIN_TEMPERATURE
    return f"wanted 0, or at least {MIN_TEMPERATURE}" if is_too_low else None


def _refused_entropy(is_requested: bool, request: Request) -> str | None:
    if is_requested and not request.given.get("return_trajectory"):
        return "wanted false, or return_trajectory: true"
    return None


def _refused_attention(dtype: str, request: Request) -> str | None:
    if dtype in ("model", request.model.defaults.get("attention_dtype")):
        return None
    return "wanted model, or a server whose --additional-config has it, too"


def _refused_canvas(kind: str, request: Request) -> str | None:
    algorithm = request.algorithm
    if (kind == "daedal") != algorithm.chooses_length:
        accepted = "daedal" if algorithm.chooses_length else "fixed or grow"
        return f"wanted {accepted} with algorithm: {algorithm.name}"
    others = [name for name in FIXED_WITH if request.given.get(name)]
    return f"wanted fixed with {', '.join(others)}" if kind == "grow" and others else None


def _canvas(_: str, request: Request) -> str:
    if request.algorithm.chooses_length:
        return "daedal"
    return "grow" if request.lengths.grows else "fixed"


def _canvas_token_ids(ids: tuple[int, ...] | None, request: Request) -> tuple[int, ...] | None:
    """Return the tokens of a canvas without a mask token; other texts are in the revision."""
    if ids is None or not request.model.family.is_open:
        return None
    length, size = request.lengths.block_length, request.model.vocab_size
    if len(ids) != length or max(ids) >= size:
        wanted = f"wanted {length} token ids (block_length) from 0 to {size - 1}"
        raise InvalidParameterError("canvas_token_ids", list(ids), wanted)
    return ids


def _refused_prediction(given_value: Any, request: Request) -> str | None:
    given, model = request.given, request.model
    if "predicted_text" in given and "predicted_token_ids" in given:
        return "wanted either predicted_text or predicted_token_ids"
    if isinstance(given_value, tuple) and max(given_value) >= model.vocab_size:
        return f"wanted token ids from 0 to {model.vocab_size - 1}"
    if given.get("draft_branches") == "all":
        return "wanted none with draft_branches: all"
    if given.get("return_trajectory"):
        return "wanted none with return_trajectory"
    return None if model.encode is not None else "wanted a server with a tokenizer"


def _predicted_token_ids(ids: tuple[int, ...] | None, request: Request) -> tuple[int, ...]:
    """Return the tokens that an answer is expected to have, without mask tokens."""
    text, model = request.given.get("predicted_text"), request.model
    if text is not None and model.encode is not None:
        ids = tuple(model.encode(text))
    return tuple(token for token in ids or () if token != model.ids.mask)


def _block_grid(grid: str | None, request: Request) -> str:
    grids = request.model.family.block_grids
    return grid if grid in grids else grids[0]


def _single_batch(is_alone: bool, request: Request) -> bool:
    return is_alone or (request.has_fp8_attention and not request.model.cuts_steps)


def _thinking_budget(budget: int | None, request: Request) -> int | None:
    return None if budget == -1 or not request.model.ids.think else budget


@dataclass(frozen=True, kw_only=True)
class RequestFields:
    """Fields of requests, in the order of the documentation.

    Each attribute has the type of the resolved value. A `ClassVar` has its effect in another
    attribute of `DiffusionParams`: `edits` or `algorithm`.

    Attributes:
        predicted_token_ids: empty without a prediction.
        canvas_token_ids: None unless the family has no mask token.
        growth: positions by which a full canvas grows, in whole blocks; 0 if it cannot grow.
        steps: number of steps, None if it is unlimited.
        top_k, top_p: None if the filter is off.
        seed: None until the engine draws one.
        suffix_ids: tokens on the canvas directly after the longest answer.
        thinking_token_budget: tokens after the prompt at which thinking ends.
        priority: None if upstream's request carries it.
        timeout_s: None if there is no timeout.
    """

    algorithm: str = param(
        "the decoding algorithm, which decides which candidates a step commits",
        default_text="the model's; threshold if a full-attention model gets `threshold`",
        choices=ALGORITHM_NAMES,
        server_wide=True,
        resolve=lambda _, r: r.algorithm.name,
    )
    use_local_leap: ClassVar[bool] = param(
        "the same as algorithm: local_leap", default=False, server_wide=True
    )
    remasking: str = param(
        "score of a candidate: its probability (low_confidence) or a random number (random)",
        default="low_confidence",
        choices=REMASKING,
        neutral=("low_confidence",),
        server_wide=True,
        uses=lambda a: a.random_scores != "none",
        applies=lambda a, model: a.can_score_at_random(is_shifted=model.is_shifted),
    )
    cache: str = param(
        "which keys and values later steps reuse. On block-causal families, exact reuses the "
        "keys and values of finished blocks, which do not change any more. On full-attention "
        "families every cache is an approximation. frozen reuses the keys and values of the "
        "prompt, with every algorithm except daedal. prefix and dual work with algorithms that "
        "fill one block after the other, except daedal. delayed works with multi_block",
        default_text="none; exact for block-causal families",
        choices=CACHES,
        server_wide=True,
        resolve=lambda _, r: r.cache,
    )
    gen_length: int = param(
        "length of the canvas in tokens. On full-attention families the model attends to the "
        "whole canvas, so the length changes the answer. On block-causal families it only limits "
        "the answer",
        default_text="max_tokens rounded up to whole blocks of 32, but at most the server's "
        "default_gen_length; 128 without max_tokens",
        minimum=1,
        aliases=("output_length",),
        resolve=lambda _, r: r.lengths.canvas,
    )
    max_tokens: int = param(
        "maximum number of tokens of the answer. With gen_length it cuts the answer, not the "
        "canvas",
        default_text="gen_length",
        minimum=1,
        aliases=("max_new_tokens",),
        resolve=lambda _, r: r.lengths.max_tokens,
    )
    canvas: str = param(
        "how the canvas gets its length. fixed: it has gen_length tokens. grow: it begins with "
        "gen_length tokens, or with the server's default_gen_length, and grows up to max_tokens "
        "while the answer has not ended. daedal: the same as algorithm: daedal",
        default_text="fixed with gen_length; grow if max_tokens exceeds default_gen_length",
        choices=("fixed", "grow", "daedal"),
        neutral=("fixed", "grow"),
        server_wide=True,
        uses=lambda a: not a.is_block_causal,
        refuse=_refused_canvas,
        resolve=_canvas,
    )
    canvas_text: ClassVar[str] = param(
        "text with which the canvas begins, instead of masks. The answer is this text with its "
        "unlikely tokens replaced",
        default_text="none",
        read=read_text,
    )
    canvas_token_ids: tuple[int, ...] | None = param(
        "the same as canvas_text, as token ids. Mask tokens among them are filled. "
        "entropy_bound: the tokens with which the first canvas begins, instead of noise; exactly "
        "block_length tokens",
        default_text="none",
        resolve=_canvas_token_ids,
    )
    pinned: ClassVar[list[tuple[int, int]]] = param(
        "parts of the text that never change, as half-open ranges [start, stop]. The numbers "
        "count the characters of canvas_text, or the tokens of canvas_token_ids. A token with a "
        "pinned character is pinned as a whole",
        default_text="none",
        read=read_spans,
    )
    noise: ClassVar[float] = param(
        "maximum share of the text's tokens that are masked again. The least likely tokens are "
        "masked first",
        default_text="no limit",
        minimum=0,
        maximum=1,
    )
    edit_threshold: ClassVar[float] = param(
        "only tokens of the text whose probability is below this value are masked again",
        default_text=f"{DEFAULT_THRESHOLD:g}; no limit with noise",
        minimum=0,
        maximum=1,
    )
    max_edits: ClassVar[int] = param(
        "maximum number of tokens of the text that may differ in the answer",
        default_text="no limit",
        minimum=0,
    )
    edit_rounds: ClassVar[int] = param(
        "maximum number of rounds. Each round scores the text, masks tokens and fills them. A "
        "round that changes nothing is the last",
        default=1,
        minimum=1,
        maximum=MAX_ROUNDS,
    )
    slack: ClassVar[int] = param(
        "number of masks that are added after every run of tokens that are masked again, so that "
        "the text may become longer or shorter. If a mask is filled with an end token, it adds "
        "no text",
        default=0,
        minimum=0,
        maximum=MAX_SLACK,
    )
    return_diff: bool = param(
        "return the unified diff between the text and the answer in the report", default=False
    )
    predicted_text: ClassVar[str] = param(
        "self_speculation, introspective: the expected text of the answer. While the answer "
        "follows this text, the tokens of the text are the drafts. This changes the speed but "
        "not the answer, except with acceptance: ratio",
        default_text="none",
        read=read_text,
        uses=lambda a: a.drafts,
        refuse=_refused_prediction,
    )
    predicted_token_ids: tuple[int, ...] = param(
        "self_speculation, introspective: the same as predicted_text, as token ids",
        default_text="none",
        uses=lambda a: a.drafts,
        refuse=_refused_prediction,
        resolve=_predicted_token_ids,
    )
    growth: int = param(
        "number of tokens by which a full canvas grows, rounded up to whole blocks",
        default=128,
        minimum=1,
        neutral=(128,),
        server_wide=True,
        uses=lambda a: not (a.is_block_causal or a.chooses_length),
        resolve=lambda _, r: r.lengths.growth,
    )
    steps: int | None = param(
        "number of denoising steps for the whole canvas. semi_ar and block-causal families: a "
        "multiple of the number of blocks. dream: any number. Other algorithms: an upper bound",
        default_text="one per canvas token; unlimited if steps is an upper bound",
        minimum=1,
        maximum=MAX_STEPS,
        aliases=("num_denoising_steps",),
        server_wide=True,
        uses=lambda a: a.pace != "rule alone",
        resolve=lambda _, r: r.lengths.steps,
    )
    block_length: int = param(
        "tokens per block; blocks are filled from left to right. On full-attention families it "
        "must divide the canvas, except that with full_attn_multi_block, adablock and daedal the "
        "last block may be shorter. On block-causal families any length is accepted",
        default_text="32 if it divides the canvas, else the whole canvas; block-causal families: "
        "the value of config.json, else 32",
        minimum=1,
        aliases=("block_size", "sub_block_size"),
        server_wide=True,
        uses=lambda a: a.blocks != "none",
        resolve=lambda _, r: r.lengths.block_length,
    )
    block_grid: str = param(
        "where blocks begin. answer: at the end of the prompt, so that the first block of the "
        "prompt may be shorter. start: at the first token of the prompt",
        default_text="answer on A2D models of block diffusion, else start",
        choices=("answer", "start"),
        neutral=("start",),
        server_wide=True,
        uses=lambda a: a.is_block_causal and a.causal_rule != a.rule,
        applies=lambda _, model: len(model.family.block_grids) > 1,
        resolve=_block_grid,
    )
    temperature: float = param(
        "0 takes the most likely token; above 0 tokens are sampled. The value scales the Gumbel "
        "noise; with dream, and on block-causal families except diffusion-gemma, it divides the "
        "logits",
        default=0.0,
        minimum=0,
        maximum=MAX_FACTOR,
        refuse=_refused_temperature,
        neutral=(0.0,),
        uses=lambda a: a.draws,
        in_sampling=True,
    )
    min_p: float = param(
        "with temperature above 0: sample only tokens whose probability is at least this share "
        "of the highest probability; 0 keeps all tokens",
        default=0.0,
        minimum=0,
        maximum=1,
        neutral=(0.0,),
        uses=lambda a: a.draws,
        in_sampling=True,
    )
    top_k: int | None = param(
        "with temperature above 0: sample only the top_k most likely tokens, and tokens that are "
        "as likely as the last of them; 0 and -1 keep all tokens",
        default_text="off",
        minimum=-1,
        neutral=(0, -1),
        uses=lambda a: a.draws,
        in_sampling=True,
        resolve=lambda k, _: k if k is not None and k > 0 else None,
    )
    top_p: float | None = param(
        "with temperature above 0: sample only the fewest most likely tokens whose probabilities "
        "sum to at least this value",
        default_text="off",
        minimum=0,
        maximum=1,
        neutral=(1.0,),
        uses=lambda a: a.draws,
        in_sampling=True,
        resolve=lambda p, _: None if p == 1 else p,
    )
    repetition_penalty: ClassVar[float] = param(
        "for tokens in the prompt and committed tokens of the answer: positive logits are "
        "divided by this value, and negative logits are multiplied by it",
        default=1.0,
        minimum=1 / MAX_FACTOR,
        maximum=MAX_FACTOR,
        in_sampling=True,
    )
    presence_penalty: ClassVar[float] = param(
        "subtracted from the logit of every token that is committed in the answer",
        default=0.0,
        minimum=-2,
        maximum=2,
        in_sampling=True,
    )
    frequency_penalty: ClassVar[float] = param(
        "subtracted from a token's logit once for each time that the token is committed in the "
        "answer",
        default=0.0,
        minimum=-2,
        maximum=2,
        in_sampling=True,
    )
    logit_bias: ClassVar[dict[int, float]] = param(
        "numbers by token id, which are added to the logits; numbers outside -100 to 100 are "
        "clipped",
        default_text="none",
        in_sampling=True,
    )
    bad_words: ClassVar[list[str]] = param(
        "words that must not appear in the answer", default_text="none", in_sampling=True
    )
    allowed_token_ids: ClassVar[tuple[int, ...]] = param(
        "the only token ids that the answer may contain", default_text="all", in_sampling=True
    )
    cfg_scale: float = param(
        "scale of classifier-free guidance. Above 0 every step also computes a second sequence, "
        "whose prompt is masked",
        default=0.0,
        minimum=0,
        maximum=MAX_FACTOR,
        neutral=(0.0,),
        server_wide=True,
        uses=lambda a: not a.is_block_causal,
        resolve=_cfg_scale,
    )
    logits_eos_inf: bool = param(
        "never predict the end-of-sequence token", default=False, needs=("eos",)
    )
    confidence_eos_eot_inf: bool = param(
        "commit end-of-sequence and end-of-turn tokens only after every other candidate",
        default=False,
        neutral=(False,),
        uses=lambda a: a.score == "confidence" and not a.is_block_causal,
        needs=("eos", "eot"),
    )
    confidence_dtype: str = param(
        "precision of the scores; `logits` means the dtype of the model's logits",
        default="float32",
        choices=("float32", "float64", "logits"),
        server_wide=True,
    )
    mask_id: int = param(
        "must be the model's mask token; any other value returns 400",
        default_text="the model's",
        resolve=lambda _, r: r.model.ids.mask,
    )
    ignore_eos: bool = param(
        "no token ends the answer, and the whole canvas is returned",
        default=False,
        in_sampling=True,
    )
    allow_infill: bool = param("also fill mask tokens in the prompt", default=False)
    suffix_ids: tuple[int, ...] = param(
        "token ids after the canvas. The answer fills the gap between the prompt and these tokens",
        default_text="none",
        resolve=lambda ids, _: ids or (),
    )
    fim_template: ClassVar[bool] = param(
        "/v1/completions and /v1/fim/completions: write both prompt and suffix into the prompt, "
        "with the tokenizer's tokens for fill-in-the-middle. Otherwise the suffix is on the "
        "canvas",
        default=False,
        refuse=lambda is_asked, _: "wanted false, or a route with suffix" if is_asked else None,
    )
    min_tokens: ClassVar[int] = param(
        "minimum number of tokens of the answer; no token can end it earlier",
        default=0,
        minimum=0,
        in_sampling=True,
    )
    seed: int | None = param(
        "seed of the request's random numbers",
        default_text="random",
        in_sampling=True,
        resolve=lambda *_: None,
    )
    stream_canvas: bool = param(
        "with stream: send an event after every denoising step, with the whole canvas, including "
        "proposals",
        default=False,
    )
    return_trajectory: bool = param(
        "return, for every token, the step that committed it and its log probability in that step",
        default=False,
    )
    return_entropy: bool = param(
        "with return_trajectory: also return the entropy of the distribution at each commit",
        default=False,
        refuse=_refused_entropy,
    )
    complete_blocks: bool = param(
        "end an answer only when the block of its last token is full. The tokens after the last "
        "token appear only in the trajectory",
        default=False,
    )
    force_single_batch: bool = param(
        "run the request alone in its steps", default=False, server_wide=True, resolve=_single_batch
    )
    attention_dtype: str = param(
        "number format of attention in forward passes over a whole long sequence: the dtype of "
        "the model (model) or fp8 (e4m3). fp8 requires a server that was started with it",
        default="model",
        choices=("model", "fp8"),
        neutral=("model",),
        server_wide=True,
        uses=lambda a: not a.is_block_causal,
        refuse=_refused_attention,
    )
    num_speculative_states: int = param(
        "maximum number of draft states per forward pass. A draft state is a predicted later "
        "state of the canvas, which the pass evaluates together with the current state. Accepted "
        "drafts save forward passes and never change the answer. 0 turns drafts off. A server on "
        "a GPU has the default 7, or 0 for diffusion-gemma",
        default=0,
        minimum=0,
        maximum=MAX_DRAFTS,
        neutral=(0,),
        server_wide=True,
        uses=lambda a: a.speculates is not None,
        resolve=lambda number, r: 0 if r.has_fp8_attention else number,
    )
    thinking_token_budget: int | None = param(
        "models that think (nemotron): maximum number of tokens of the answer before the token "
        "that ends thinking; -1 is unlimited",
        default_text="none",
        minimum=-1,
        neutral=(-1,),
        server_wide=True,
        in_sampling=True,
        applies=lambda _, model: bool(model.ids.think),
        resolve=_thinking_budget,
    )
    priority: int | None = param(
        "scheduling priority; requests with a lower value run first",
        default_text="0",
        minimum=-(2**31),
        maximum=2**31 - 1,
    )
    timeout_s: float | None = param(
        "seconds after arrival at which an unfinished request ends, whether it waits or runs. It "
        "ends with finish_reason abort, or with HTTP 504 if nothing was streamed",
        default_text="none",
        minimum=0.001,
        server_wide=True,
    )
