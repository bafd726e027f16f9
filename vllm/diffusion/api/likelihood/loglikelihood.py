# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/loglikelihood`: log likelihood of a continuation of a context."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from vllm.diffusion.api.adapter_requests import answered_model
from vllm.diffusion.api.bodies import check_text_length
from vllm.diffusion.api.choices import stream_outputs
from vllm.diffusion.api.likelihood.estimator import draw_maskings, estimate
from vllm.diffusion.api.likelihood.prompt_scores import TERMS, ScoreClient, ScoreQuery
from vllm.diffusion.api.protocol import Usage, check_model
from vllm.diffusion.api.schema import described, parameters_of
from vllm.diffusion.api.streams import final_output
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.decision import attach
from vllm.diffusion.request.fields import BY_NAME
from vllm.diffusion.request.params import SEED_BITS, signed_seed
from vllm.diffusion.request.values import MAX_FACTOR
from vllm.diffusion.request.values import Field as Parameter
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.api.likelihood.estimator import Masking
    from vllm.diffusion.api.validator import Validator
    from vllm.engine.protocol import EngineClient

# Samples of one request. Forwards are scheduled one by one, so other requests continue meanwhile.
MAX_SAMPLES = 4096
# Tokens of all samples of a request together, which bounds its memory to 1 GiB.
MAX_TOKENS = 2**25
DEFAULT_BATCH_SIZE = 32
# Further decimals depend, in fp32, on the other requests in the same step.
DECIMALS = 5

# Parameters of the greedy check; they override the server's defaults.
_PUBLISHED_LOOP: dict[str, Any] = {
    "algorithm": "semi_ar",
    "remasking": "low_confidence",
    "cache": "none",
    "temperature": 0.0,
    "ignore_eos": True,
    "logits_eos_inf": False,
    "confidence_eos_eot_inf": False,
    "confidence_dtype": "float32",
    "seed": 0,
}

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "mc_num",
        int,
        "number of samples of the estimate; one is exact for a continuation of one token",
        default=128,
        minimum=1,
        maximum=MAX_SAMPLES,
    ),
    Parameter(
        "batch_size",
        int,
        "samples whose numbers of masks are evenly distributed; must divide mc_num",
        default_text=f"the largest divisor of mc_num up to {DEFAULT_BATCH_SIZE}",
        minimum=1,
        maximum=MAX_SAMPLES,
    ),
    Parameter("seed", int, "seed of the masks", default=1234),
    Parameter(
        "cfg",
        float,
        "classifier-free guidance; above 0 every pass also computes a second sequence with a "
        "masked context",
        default=0.0,
        minimum=0,
        maximum=MAX_FACTOR,
        aliases=("cfg_scale",),
    ),
    Parameter(
        "check_greedy",
        bool,
        "also check whether greedy decoding reproduces the continuation; takes one forward pass "
        "per token, one after the other",
        default=False,
        aliases=("is_check_greedy", "is_greedy"),
    ),
    Parameter(
        "add_special_tokens",
        bool,
        "add the tokenizer's special tokens to a context given as text",
        default=True,
    ),
    *(BY_NAME[name] for name in TERMS),
)


class LikelihoodBody(BaseModel):
    """Fields of the body other than the parameters."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="name of the served model")
    context: Any = Field("", description="text or token ids; never masked, except for guidance")
    continuation: Any = Field(..., description="text or token ids, the same kind as the context")
    masks: Any = Field(
        None,
        description="instead of mc_num: for every sample the masked positions of the continuation, "
        "from 0",
    )


LikelihoodRequest = create_model(
    "LikelihoodRequest",
    __base__=LikelihoodBody,
    __doc__="Body of POST /v1/loglikelihood.",
    **described(PARAMETERS),
)


class LikelihoodResponse(BaseModel):
    """Answer of POST /v1/loglikelihood.

    Attributes:
        loglikelihood: natural log likelihood of the continuation: the mean of the samples.
        stderr: standard error of the estimate; 0 if no masks are drawn, null if a single sample
            cannot give one.
        is_greedy: whether greedy decoding reproduces the continuation, if checked.
        forwards: number of forward passes; samples that mask the same tokens share one.
        num_tokens: number of tokens of the continuation.
        seed: seed of the maskings, if they were drawn.
        logprobs: for every element of `masks`, log probabilities of the masked tokens.
    """

    id: str
    object: Literal["loglikelihood"] = "loglikelihood"
    created: int
    model: str
    loglikelihood: float
    stderr: float | None
    is_greedy: bool | None = None
    forwards: int
    num_tokens: int
    seed: int | None = None
    logprobs: list[list[float]] | None = None
    usage: Usage

    def content(self) -> dict[str, Any]:
        """Return the answer as JSON, without fields that were not requested."""
        optional = {"is_greedy", "seed", "logprobs"}
        return self.model_dump(exclude={name for name in optional if getattr(self, name) is None})


@dataclass(frozen=True)
class _ScoringTask:
    """A checked body: token ids and the maskings of all samples."""

    context: list[int]
    continuation: list[int]
    maskings: Sequence[Masking]
    cfg: float
    seed: int | None
    checks_greedy: bool
    terms: dict[str, Any]

    def query(self, masked: Masking, mask_id: int) -> ScoreQuery:
        start, tokens = len(self.context), [*self.context, *self.continuation]
        for position in masked:
            tokens[start + position] = mask_id
        return ScoreQuery(
            tokens,
            [start + position for position in masked],
            [[self.continuation[position]] for position in masked],
            cfg_scale=self.cfg,
            context_length=start,
        )


class LikelihoodHandler:
    """Handler of `/v1/loglikelihood`; for arguments see `GenerateHandler`."""

    def __init__(
        self, engine: EngineClient, validator: Validator, model_names: Sequence[str]
    ) -> None:
        self._engine = engine
        self._validator = validator
        self._model_names = model_names
        self._score_client = ScoreClient(engine, validator)

    async def answer(self, body: LikelihoodBody, request_id: str) -> LikelihoodResponse:
        """Run all forward passes. Cancelling this coroutine aborts them.

        Raises:
            RequestRefused: HTTP 400, naming the field.
            VLLMNotFoundError: HTTP 404, for a model that is not served.
        """
        check_model(body.model, self._model_names)
        try:
            # A thread tokenises texts and draws maskings, so that other requests are served
            # meanwhile.
            task = await asyncio.to_thread(self._task_of, body)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        distinct = list(dict.fromkeys(task.maskings))
        mask_id = self._validator.mask_id
        queries = await asyncio.to_thread(
            lambda: [task.query(masked, mask_id) for masked in distinct]
        )
        results = await self._score_client.run(queries, request_id, task.terms)
        logprobs = {
            masked: [values[0] for values in result.scores.logprobs]
            for masked, result in zip(distinct, results, strict=True)
        }
        length = len(task.continuation)
        estimated = estimate(task.maskings, logprobs, length)
        is_greedy, is_given = None, body.masks is not None
        stderr = 0.0 if is_given else estimated.stderr
        if task.checks_greedy:
            is_greedy = await self._is_greedy(task, request_id)
        num_tokens = len(task.context) + length
        return LikelihoodResponse(
            id=request_id,
            created=int(time.time()),
            model=answered_model(self._model_names),
            loglikelihood=round(estimated.loglikelihood, DECIMALS),
            stderr=stderr if stderr is None else round(stderr, DECIMALS),
            is_greedy=is_greedy,
            forwards=len(distinct) + (length if task.checks_greedy else 0),
            num_tokens=length,
            seed=task.seed,
            logprobs=[logprobs[masked] for masked in task.maskings] if is_given else None,
            usage=Usage(prompt_tokens=num_tokens, completion_tokens=0, total_tokens=num_tokens),
        )

    def _task_of(self, body: LikelihoodBody) -> _ScoringTask:
        self._validator.refuse_blocks("/v1/loglikelihood", "POST /v1/completions: echo, logprobs")
        values = parameters_of(body, LikelihoodBody, PARAMETERS)
        context, continuation = self._token_ids(body, values.get("add_special_tokens", True))
        for name, ids in (("context", context), ("continuation", continuation)):
            if self._validator.mask_id in ids:
                raise InvalidParameterError(
                    name, self._validator.mask_id, "it holds the mask token; wanted it without"
                )
        if not continuation:
            raise InvalidParameterError(
                "continuation", body.continuation, "wanted at least one token"
            )
        checks_greedy = values.get("check_greedy", False)
        if checks_greedy and not context:
            raise InvalidParameterError("check_greedy", True, "wanted false without a context")
        num_samples = len(body.masks) if isinstance(body.masks, list) else values.get("mc_num", 128)
        self._check_size(len(context) + len(continuation), num_samples)
        seed, maskings = _maskings(body.masks, values, len(continuation))
        return _ScoringTask(
            context=context,
            continuation=continuation,
            maskings=maskings,
            cfg=values.get("cfg", 0.0),
            seed=seed,
            checks_greedy=checks_greedy,
            terms={name: values[name] for name in TERMS if name in values},
        )

    def _check_size(self, num_tokens: int, num_samples: int) -> None:
        """Refuse a sequence longer than the model's limit, or samples with too many tokens."""
        longest = self._engine.model_config.max_model_len
        if num_tokens > longest:
            wanted = f"wanted at most {longest} tokens, the server's max_model_len"
            raise InvalidParameterError("context + continuation", num_tokens, wanted)
        max_samples = MAX_TOKENS // max(1, num_tokens)
        if num_samples > max_samples:
            wanted = f"wanted at most {max_samples} samples of {num_tokens} tokens"
            raise InvalidParameterError("mc_num", num_samples, wanted)

    def _token_ids(self, body: LikelihoodBody, adds_special: bool) -> tuple[list[int], list[int]]:
        """Return the tokens of context and continuation.

        Texts are encoded together; trailing spaces of the context count as part of the
        continuation.
        """
        context, continuation = body.context, body.continuation
        if isinstance(context, str) and isinstance(continuation, str):
            stripped = context.rstrip()
            continuation = context[len(stripped) :] + continuation
            tokenizer = self._engine.renderer.get_tokenizer()
            longest = self._engine.model_config.max_model_len
            whole_text = stripped + continuation
            check_text_length("context + continuation", whole_text, tokenizer, longest)
            encode = tokenizer.encode
            whole = encode(whole_text, add_special_tokens=adds_special)
            before = encode(stripped, add_special_tokens=adds_special)
            return list(before), list(whole[len(before) :])
        if context == "":
            context = []
        for name, ids in (("context", context), ("continuation", continuation)):
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise InvalidParameterError(
                    name, ids, "wanted text or token ids, of the same kind for both"
                )
        return context, continuation

    async def _is_greedy(self, task: _ScoringTask, request_id: str) -> bool:
        """Return whether the model reproduces the continuation by greedy decoding."""
        length = len(task.continuation)
        wanted = {**_PUBLISHED_LOOP, "cfg_scale": task.cfg}
        wanted |= dict.fromkeys(("gen_length", "max_tokens", "block_length", "steps"), length)
        decided = self._validator.decide({**wanted, **task.terms}, task.context)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        attach(sampling, decided)
        outputs = stream_outputs(
            self._engine, tokens_input(task.context), sampling, f"{request_id}-greedy"
        )
        written = (await final_output(outputs)).outputs[0].token_ids
        return list(written) == task.continuation


def _maskings(
    masks: Any, values: dict[str, Any], length: int
) -> tuple[int | None, Sequence[Masking]]:
    """Return the seed, if one is used, and the maskings of all samples."""
    if masks is not None:
        for name in ("mc_num", "batch_size", "seed"):
            if name in values:
                raise InvalidParameterError(name, values[name], "wanted masks without it")
        return None, _given_maskings(masks, length)
    mc_num, seed = values.get("mc_num", 128), values.get("seed", 1234) % 2**SEED_BITS
    default = next(n for n in range(min(mc_num, DEFAULT_BATCH_SIZE), 0, -1) if mc_num % n == 0)
    batch_size = values.get("batch_size", default)
    if mc_num % batch_size:
        raise InvalidParameterError("batch_size", batch_size, f"wanted a divisor of {mc_num}")
    # Every sample masks the only token.
    if length == 1:
        return seed, [(0,)]
    return seed, draw_maskings(length, mc_num, batch_size, signed_seed(seed))


def _given_maskings(masks: Any, length: int) -> list[Masking]:
    if not isinstance(masks, list) or not 1 <= len(masks) <= MAX_SAMPLES:
        raise InvalidParameterError("masks", masks, f"wanted 1 to {MAX_SAMPLES} lists")
    for masked in masks:
        is_list = isinstance(masked, list) and masked and all(type(p) is int for p in masked)
        if not is_list or not all(0 <= p < length for p in masked):
            raise InvalidParameterError(
                "masks", masked, f"wanted positions of the continuation, 0 to {length - 1}"
            )
        if len(set(masked)) < len(masked):
            raise InvalidParameterError("masks", masked, "wanted every position once")
    return [tuple(sorted(masked)) for masked in masks]
