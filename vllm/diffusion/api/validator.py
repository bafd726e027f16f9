# SPDX-License-Identifier: Apache-2.0
"""Validator: decides a request completely, and once, before it enters the engine.

Our HTTP handlers call it before they answer anything, and attach the decision to what they pass on.
Upstream's front end then makes the engine's request from prompt and parameters; there the validator
decides those that come without a decision: of the offline `LLM`, and of routes that are not ours.
So all refusals use the same words, and engines of other models are left alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api import outside_calls
from vllm.diffusion.config import family_of, served_model
from vllm.diffusion.core.errors import ActivationBudgetError, InvalidParameterError
from vllm.diffusion.core.surrogates import refuse_lone_surrogates
from vllm.diffusion.engine.planning import demand_of, make_planner
from vllm.diffusion.memory import Admission, Rates
from vllm.diffusion.request.decision import (
    attach,
    check_score,
    decide,
    is_decided,
    request_values_of,
    requested_format,
)
from vllm.diffusion.request.likelihood import SCORE, SCORED_AS
from vllm.exceptions import VLLMValidationError
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.diffusion.guided.guides import Guide, Spec
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.served_model import ServedModel

MAX_CACHED_DECISIONS = 4096  # decisions on score queries

_upstreams: Callable[..., EngineCoreRequest] = InputProcessor.process_inputs
_upstreams_adding: Callable[..., Any] = AsyncLLM.add_request
_held: ContextVar[Guide | None] = ContextVar("language of the request that is prepared")
_upstreams_ids: Callable[[EngineCoreRequest], None] = InputProcessor.assign_request_id
_upstreams_add: Callable[..., str] = LLMEngine.add_request
_upstreams_add_async: Callable[..., Awaitable[None]] = AsyncLLM._add_request


class RequestRefused(VLLMValidationError, ValueError):
    """HTTP 400; the message names the field already, so nothing is appended to it.

    Programs that use `LLM` catch it as a ValueError, as upstream documents for bad parameters.

    Attributes:
        reason: label under which it is counted: the field at fault, or `memory` for steps that
            never fit into it.
    """

    def __init__(self, error: InvalidParameterError) -> None:
        VLLMValidationError.__init__(self, str(error), parameter=error.field)
        self.reason = "memory" if isinstance(error, ActivationBudgetError) else error.field

    def __str__(self) -> str:
        return str(self.args[0])


class Validator:
    """Decides requests for one engine configuration."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._admission: Admission | None = None
        self._cached_decisions: dict[Any, DiffusionParams] = {}  # of score queries

    @cached_property
    def _model(self) -> ServedModel:
        """Facts about the model; made at first use, as upstream loads the tokenizer later."""
        return served_model(self._vllm_config)

    @property
    def mask_id(self) -> int:
        """The model's mask token."""
        return self._model.ids.mask

    @property
    def bounds_thinking(self) -> bool:
        """Whether `thinking_token_budget` acts on the model."""
        return bool(self._model.ids.think)

    @property
    def turn_end(self) -> tuple[int, ...]:
        """Token that ends a turn, if the checkpoint has one."""
        ids = self._model.ids
        end = ids.eos if ids.eot is None else ids.eot
        return () if end is None else (end,)

    @property
    def block_length(self) -> int | None:
        """Positions that are read together in a block-causal family; None in others."""
        if not self._model.family.is_block_causal:
            return None
        return decide({"gen_length": 1}, self._model, [0]).kept_unit

    def refuse_blocks(self, what: str, instead: str) -> None:
        """Refuse a feature that has no clear meaning under block-causal attention.

        Raises:
            InvalidParameterError: naming `model`.
        """
        family = self._model.family
        if family.is_block_causal:
            raise InvalidParameterError(
                "model",
                family.name,
                f"{what} is of families whose positions all see each other; wanted {instead}",
            )

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests reuse keys and values of others with an equal prefix."""
        return bool(self._vllm_config.cache_config.enable_prefix_caching)

    def times(self, request: Mapping[str, Any]) -> bool:
        """Whether a request with these parameters, under canonical names, has a timeout."""
        return "timeout_s" in request or "timeout_s" in self._model.defaults

    def learn_capacity(self, budget_bytes: int, rates: Iterable[float]) -> None:
        """From now on, refuse requests that do not fit into this activation memory.

        Args:
            budget_bytes: bytes for steps and kept keys and values.
            rates: the numbers of `Rates`, by which ranks divide rows.
        """
        planner = make_planner(self._vllm_config, budget_bytes, Rates._make(rates))
        self._admission = Admission(planner)
        self._cached_decisions.clear()

    async def compile(self, spec: Spec | None) -> None:
        """Compile the requested format, if needed, while other requests are served.

        The running task holds the result, so that it is there when the request is decided.

        Raises:
            RequestRefused: the format cannot be compiled.
        """
        if spec is not None and (guides := self._model.guides) is not None:
            try:
                _held.set(await guides.compiled(spec))
            except InvalidParameterError as error:
                raise RequestRefused(error) from None

    async def compile_sampling(self, sampling: Any) -> None:
        """Compile the format that a `SamplingParams` asks for.

        Raises:
            RequestRefused: the format is none, or cannot be compiled.
        """
        try:
            spec = requested_format(sampling)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        await self.compile(spec)

    def longest_request(self) -> int:
        """Length, prompt and canvas in equal parts, of the longest request that fits."""
        prompt = [0 if self._model.ids.mask else 1]
        params = self.decide({"gen_length": 1}, prompt)
        admission = self._admission

        def is_refused(length: int) -> bool:
            canvas = replace(params, gen_length=max(1, length // 2))
            try:
                if admission is not None:
                    admission.check(demand_of(canvas, length - canvas.gen_length))
            except ActivationBudgetError:
                return True
            return False

        longest = self._model.max_model_len
        if not is_refused(longest):
            return longest
        return bisect_left(range(longest), x=True, key=is_refused) - 1

    def decide(
        self, request: Mapping[str, Any], prompt_token_ids: Sequence[int]
    ) -> DiffusionParams:
        """Decide the parameters of a request that gives values under canonical names.

        Raises:
            RequestRefused: naming the field, the given and the wanted value.
        """
        try:
            decided = decide(request, self._model, prompt_token_ids)
            if self._admission is not None:
                self._admission.check(demand_of(decided, len(prompt_token_ids)))
            return decided
        except InvalidParameterError as error:
            raise RequestRefused(error) from None

    def decide_query(
        self, score: Mapping[str, Any], prompt: Sequence[int], terms: Mapping[str, Any]
    ) -> DiffusionParams:
        """Decide the parameters of a likelihood request.

        Requests of one length differ only in the scored positions: the rest is decided once.

        Args:
            score: values for `request.likelihood.likelihood_request`; the decision may have the
                scores of another request.
            prompt: the sequence.
            terms: further values that it may give.
        """
        key = (len(prompt), score["cfg_scale"], *sorted(terms.items()))
        if key not in self._cached_decisions:
            decided = self.decide({SCORE: score, **SCORED_AS, **terms}, prompt)
            if len(self._cached_decisions) >= MAX_CACHED_DECISIONS:
                self._cached_decisions.clear()
            self._cached_decisions[key] = decided
            return decided
        try:
            check_score(score, self._model, prompt)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        return self._cached_decisions[key]

    def decide_sampling(self, sampling: Any, prompt_token_ids: Sequence[int]) -> DiffusionParams:
        """Decide the parameters that a `SamplingParams` asks for."""
        try:
            refuse_lone_surrogates(_texts_of(sampling))
            request = request_values_of(sampling)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        return self.decide(request, prompt_token_ids)


def _texts_of(sampling: Any) -> dict[str, Any]:
    """Return the values of a `SamplingParams` that hold texts of a client."""
    formats = getattr(sampling, "structured_outputs", None)
    names = ("stop", "bad_words", "extra_args")
    texts = {name: getattr(sampling, name, None) for name in names}
    return {**texts, "structured_outputs": None if formats is None else dict(vars(formats))}


def install() -> None:
    """Let every front end of this process have its requests decided, and lose none."""
    InputProcessor.process_inputs = _process_inputs
    AsyncLLM.add_request = _add_compiled
    outside_calls.install()
    InputProcessor.assign_request_id = staticmethod(_assign_request_id)
    RENDERER_REGISTRY.renderers["hf"] = ("vllm.diffusion.api.rendering", "DiffusionRenderer")
    LLMEngine.add_request = _add_request
    AsyncLLM._add_request = _add_request_async


def is_installed() -> bool:
    """Whether an engine for one of our models was configured in this process."""
    return InputProcessor.process_inputs is _process_inputs


def validator_of(front_end: InputProcessor) -> Validator | None:
    """Return the validator of an engine's front end, or None if its model is not ours."""
    attributes = vars(front_end)
    if "diffusion_validator" not in attributes:
        is_ours = family_of(front_end.vllm_config) is not None
        front_end.diffusion_validator = Validator(front_end.vllm_config) if is_ours else None
    validator: Validator | None = front_end.diffusion_validator
    return validator


async def _add_compiled(
    self: AsyncLLM, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
) -> Any:
    """Run upstream's function, which decides the request, after its format has been compiled."""
    validator = validator_of(self.input_processor)
    if validator is not None and isinstance(params, SamplingParams) and not is_decided(params):
        await validator.compile_sampling(params)
    return await _upstreams_adding(self, request_id, prompt, params, *args, **options)


def _process_inputs(
    self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
) -> EngineCoreRequest:
    """Run upstream's function, and attach a decision to the parameters of its result."""
    validator = validator_of(self)
    if validator is None or not isinstance(params, SamplingParams) or is_decided(params):
        return _upstreams(self, request_id, prompt, params, *args, **options)
    decided = None
    if isinstance(prompt, dict) and "type" in prompt:  # tokenised: our words before upstream's
        decided = validator.decide_sampling(params, prompt.get("prompt_token_ids") or [])
    sampling = params
    if params.structured_outputs is not None or params.bad_words:
        params = params.clone()
        params.structured_outputs = None  # upstream's checks are of its own grammars
        params.bad_words = None  # and it would tokenise words, however many
    request = _upstreams(self, request_id, prompt, params, *args, **options)
    if decided is None:
        decided = validator.decide_sampling(sampling, request.prompt_token_ids or [])
    attach(request.sampling_params, decided.with_answers(params.n))
    return request


def _assign_request_id(request: EngineCoreRequest) -> None:
    """Run upstream's function, the last one before a request is registered, and check the request.

    Raises:
        RequestRefused: the engine could not read the request. Its input thread decodes messages
            and ends where one does not fit, so such a request must not be sent.
    """
    _upstreams_ids(request)
    if not isinstance(request.sampling_params, SamplingParams) or not is_decided(
        request.sampling_params
    ):
        return
    try:
        MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestRefused(_unreadable(request, error)) from None


def _unreadable(request: EngineCoreRequest, error: Exception) -> InvalidParameterError:
    """Name the field of a request that its message does not allow.

    A decoder says where it is, as `$[13]` or `$[3].stop[0]`; an encoder does not.
    """
    sampling = request.sampling_params
    place = re.search(r"\$\[(\d+)\]\.?([\w\[\].]*)", str(error))
    number = int(place[1]) if place else None
    names = EngineCoreRequest.__struct_fields__
    if place is None or number is None or number >= len(names):
        return InvalidParameterError("request", request.external_req_id, f"wanted less: {error}")
    name, owner = names[number], request
    if name == "sampling_params" and place[2]:
        name, owner = place[2], sampling
    given = getattr(owner, name.partition("[")[0].partition(".")[0], None)
    return InvalidParameterError(name, given, f"{error}".partition(" - at ")[0])


def _add_request(self: LLMEngine, request_id: str, *args: Any, **options: Any) -> str:
    """Run upstream's function of the offline engine; a request that fails in it leaves nothing.

    Upstream registers a request before it is sent, and a registered request is waited for.
    """
    registered = self.output_processor.external_req_ids
    before = list(registered.get(request_id, ()))
    try:
        return _upstreams_add(self, request_id, *args, **options)
    except BaseException:
        new = [own_id for own_id in registered.get(request_id, ()) if own_id not in before]
        self.abort_request(new, internal=True)
        raise


async def _add_request_async(self: AsyncLLM, request: EngineCoreRequest, *args: Any) -> None:
    """Do the same for the engine of a server."""
    try:
        await _upstreams_add_async(self, request, *args)
    except BaseException:
        await self.abort(request.request_id, internal=True)
        raise
