# SPDX-License-Identifier: Apache-2.0
"""Validator: decides all parameters of a request, once, before it enters the engine.

Our HTTP handlers call it before they send anything, and attach the decision to the request. Later,
upstream's front end makes the engine's request from prompt and parameters. There the validator
decides requests without a decision, from the offline `LLM` and from upstream's routes. So all
refusals have the same form, and engines of other models are not affected.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.diffusion import metrics
from vllm.diffusion.adapters.lora_flags import reader_of
from vllm.diffusion.api import adapter_requests, outside_calls
from vllm.diffusion.api.adapter_requests import AdapterRequests
from vllm.diffusion.config import family_of, served_model
from vllm.diffusion.core.errors import ActivationBudgetError, AdapterError, InvalidParameterError
from vllm.diffusion.core.surrogates import refuse_lone_surrogates
from vllm.diffusion.engine.planning import demand_of, make_planner
from vllm.diffusion.memory import Admission, Rates
from vllm.diffusion.request.algorithms import algorithms_for
from vllm.diffusion.request.decision import (
    DECISION,
    attach,
    check_extra_args,
    check_score,
    decide,
    is_decided,
    request_values_of,
    requested_format,
)
from vllm.diffusion.request.likelihood import SCORE, SCORED_AS
from vllm.diffusion.request.revision import families_that_revise, revises
from vllm.diffusion.request.served_model import NO_MASK
from vllm.exceptions import VLLMValidationError
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.stats import LoRARequestStates
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from vllm.config import VllmConfig
    from vllm.diffusion.guided.guides import Guide, Spec
    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.served_model import ServedModel
    from vllm.lora.request import LoRARequest
    from vllm.v1.metrics.stats import SchedulerStats

MAX_CACHED_DECISIONS = 4096  # decisions about score queries

_upstreams: Callable[..., EngineCoreRequest] = InputProcessor.process_inputs
_upstreams_adding: Callable[..., Any] = AsyncLLM.add_request
_held: ContextVar[Guide | None] = ContextVar("language of the request that is prepared")
_upstreams_ids: Callable[[EngineCoreRequest], None] = InputProcessor.assign_request_id
_upstreams_add: Callable[..., str] = LLMEngine.add_request
_upstreams_add_async: Callable[..., Awaitable[None]] = AsyncLLM._add_request
_upstreams_update: Callable[..., None] = LoRARequestStates.update_scheduler_stats


class RequestRefused(VLLMValidationError, ValueError):
    """HTTP 400. The message names the field already, so upstream appends nothing to it.

    Programs that use `LLM` catch it as a ValueError, as upstream documents for invalid parameters.

    Attributes:
        reason: label under which the refusal is counted: the invalid field, or `memory` for
            requests whose steps cannot fit into memory.
    """

    def __init__(self, error: InvalidParameterError) -> None:
        VLLMValidationError.__init__(self, str(error), parameter=error.field)
        self.reason = "memory" if isinstance(error, ActivationBudgetError) else error.field

    def __str__(self) -> str:
        return str(self.args[0])


class AdapterRefused(RequestRefused):
    """HTTP 400: a request names an adapter that cannot be served."""

    def __init__(self, error: AdapterError) -> None:
        VLLMValidationError.__init__(self, str(error), parameter="lora_request")
        self.reason = "lora_request"


class Validator:
    """Decides the parameters of requests for one engine configuration."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._admission: Admission | None = None
        self._cached_decisions: dict[Any, DiffusionParams] = {}  # for score queries

    @cached_property
    def adapters(self) -> AdapterRequests:
        """The adapters that requests may name."""
        return AdapterRequests(reader_of(self._vllm_config))

    @cached_property
    def _model(self) -> ServedModel:
        """Facts about the model, created at first use because upstream loads the tokenizer late."""
        return served_model(self._vllm_config)

    @property
    def mask_id(self) -> int:
        """The model's mask token.

        Raises:
            InvalidParameterError: the model has none.
        """
        if self._model.ids.mask == NO_MASK:
            family = self._model.family.name
            raise InvalidParameterError("model", family, "wanted a family with a mask token")
        return self._model.ids.mask

    def inserts_tokens(self, algorithm: object) -> bool:
        """Whether an algorithm, by default the model's, also deletes and inserts tokens."""
        named = self._algorithm(algorithm)
        return named is not None and named.edits_length

    def scores_texts(self, algorithm: object) -> bool:
        """Whether tokens of a text are masked again by their scores, so that `slack` has effect."""
        named = self._algorithm(algorithm)
        return named is not None and named.text_rule is None

    def _algorithm(self, given: object) -> Algorithm | None:
        """Return the algorithm of a name, by default the model's; None if there is none."""
        name = given or self._model.default_algorithm
        return algorithms_for(self._model.family).get(name) if isinstance(name, str) else None

    @property
    def bounds_thinking(self) -> bool:
        """Whether `thinking_token_budget` has an effect on the model."""
        return bool(self._model.ids.think)

    @property
    def turn_end(self) -> tuple[int, ...]:
        """The token that ends a turn, as a tuple; empty if the checkpoint has none."""
        ids = self._model.ids
        end = ids.eos if ids.eot is None else ids.eot
        return () if end is None else (end,)

    @property
    def reads_causally(self) -> bool:
        """Whether the distribution of a token of the prompt depends only on those before it."""
        return self._model.family.has_causal_context

    @property
    def block_length(self) -> int | None:
        """Number of positions of a block in a block-causal family; None in other families."""
        if not self._model.family.is_block_causal:
            return None
        return decide({"gen_length": 1}, self._model, [0]).kept_unit

    def tokens_of(self, field: str, text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        """Return the tokens of a text and the first character and last + 1 of each.

        Raises:
            InvalidParameterError: naming `field`; the text has a mask token, or there is no
                tokenizer that reports characters.
        """
        model = self._model
        if model.encode is None or model.spans is None:
            raise InvalidParameterError(field, text, "wanted a server with a tokenizer")
        token_ids = model.encode(text)
        if model.ids.mask in token_ids:
            raise InvalidParameterError(field, text, "wanted a text without mask tokens")
        return token_ids, model.spans(text)

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

    def refuse_suffix(self, suffix: str) -> None:
        """Refuse a text after the answer, if no position of the model attends to it.

        Raises:
            InvalidParameterError: naming `suffix`.
        """
        family = self._model.family
        if family.is_block_causal:
            wanted = f"wanted none, or fim_template: true: a model of family {family.name}"
            raise InvalidParameterError("suffix", suffix, f"{wanted} does not see what follows")

    def refuse_revisions(self, route: str) -> None:
        """Refuse a route that revises texts, if the model cannot.

        Raises:
            InvalidParameterError: naming `model`.
        """
        family = self._model.family
        if not revises(family):
            wanted = f"{route} revises texts; wanted {families_that_revise()}"
            raise InvalidParameterError("model", family.name, wanted)

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests reuse keys and values of other requests with an equal prefix."""
        return bool(self._vllm_config.cache_config.enable_prefix_caching)

    def times(self, request: Mapping[str, Any]) -> bool:
        """Return whether a request with these parameters, by canonical name, has a timeout."""
        return "timeout_s" in request or "timeout_s" in self._model.defaults

    def learn_capacity(self, budget_bytes: int, rates: Iterable[float]) -> None:
        """Set the activation memory; later requests that do not fit into it are refused.

        Args:
            budget_bytes: bytes for steps and for keys and values that are kept.
            rates: the numbers of `Rates`, by which ranks divide rows.
        """
        planner = make_planner(self._vllm_config, budget_bytes, Rates._make(rates))
        self._admission = Admission(planner)
        self._cached_decisions.clear()

    async def compile(self, spec: Spec | None) -> None:
        """Compile the requested format, if necessary, while other requests are served.

        The running task keeps a reference to the result, so that it is still cached when the
        request is decided.

        Raises:
            RequestRefused: the format cannot be compiled.
        """
        if spec is not None and (guides := self._model.guides) is not None:
            try:
                _held.set(await guides.compiled(spec))
            except InvalidParameterError as error:
                raise RequestRefused(error) from None

    async def compile_sampling(self, sampling: Any) -> None:
        """Compile the format that a `SamplingParams` requests.

        Raises:
            RequestRefused: the format is invalid, or cannot be compiled.
        """
        try:
            spec = requested_format(sampling)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        await self.compile(spec)

    def longest_request(self) -> int:
        """Return the number of tokens of the longest request that fits, half of it canvas."""
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
        """Decide the parameters of a request.

        Args:
            request: values by canonical name.
            prompt_token_ids: tokens of the prompt.

        Raises:
            RequestRefused: naming the field, the given and the expected value.
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

        Requests of one length differ only in the scored positions, so their decision is cached.

        Args:
            score: values for `request.likelihood.likelihood_request`; the decision may have the
                scores of another request.
            prompt: the sequence.
            terms: further values of the request.
        """
        shares_prefix = score.get("shares_prefix", False)
        key = (len(prompt), score["cfg_scale"], shares_prefix, *sorted(terms.items()))
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
        """Decide the parameters of a request that a `SamplingParams` describes."""
        try:
            check_extra_args(sampling)
            refuse_lone_surrogates(_texts_of(sampling))
            request = request_values_of(sampling)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        return self.decide(request, prompt_token_ids)


def _texts_of(sampling: Any) -> dict[str, Any]:
    """Return the values of a `SamplingParams` that contain text of a client."""
    formats = getattr(sampling, "structured_outputs", None)
    names = ("stop", "bad_words", "extra_args")
    texts = {name: getattr(sampling, name, None) for name in names}
    return {**texts, "structured_outputs": None if formats is None else dict(vars(formats))}


def install() -> None:
    """Patch upstream's front ends in this process so that every request is decided, and none
    leaks.
    """
    InputProcessor.process_inputs = _process_inputs
    LoRARequestStates.update_scheduler_stats = _unpack_and_update
    AsyncLLM.add_request = _add_compiled
    outside_calls.install()
    InputProcessor.assign_request_id = staticmethod(_assign_request_id)
    RENDERER_REGISTRY.renderers["hf"] = ("vllm.diffusion.api.rendering", "DiffusionRenderer")
    LLMEngine.add_request = _add_request
    AsyncLLM._add_request = _add_request_async


def _unpack_and_update(self: LoRARequestStates, scheduler_stats: SchedulerStats | None) -> None:
    """Take out our observations, then run upstream's function, which adds names of adapters."""
    if scheduler_stats is not None:
        metrics.unpack(scheduler_stats)
    _upstreams_update(self, scheduler_stats)


def is_installed() -> bool:
    """Return whether an engine for one of our models was configured in this process."""
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
    """Compile the format of a request, then run upstream's function, which decides the request."""
    validator = validator_of(self.input_processor)
    if validator is not None and isinstance(params, SamplingParams) and not is_decided(params):
        await validator.compile_sampling(params)
    with _refusing_adapters():
        unchecked = _new_adapter(validator, (prompt, params, *args), options)
        if unchecked is not None:
            adapters, adapter = unchecked
            replacement = adapters.check(adapter, await self.list_loras())
            if replacement is not None:
                await self.add_lora(replacement)
                adapters.note(replacement)
    return await _upstreams_adding(self, request_id, prompt, params, *args, **options)


def _process_inputs(
    self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
) -> EngineCoreRequest:
    """Run upstream's function, and attach a decision to the parameters of its result."""
    validator = validator_of(self)
    if validator is None or not isinstance(params, SamplingParams) or is_decided(params):
        return _upstreams(self, request_id, prompt, params, *args, **options)
    decided = None
    # Decide tokenised prompts first, so that our messages precede upstream's.
    if isinstance(prompt, dict) and "type" in prompt:
        decided = validator.decide_sampling(params, prompt.get("prompt_token_ids") or [])
    sampling = params
    budget = params.thinking_token_budget
    if params.structured_outputs is not None or params.bad_words or budget is not None:
        params = params.clone()
        # Upstream would check them against its own grammars.
        params.structured_outputs = None
        # Upstream would tokenise every word, without a limit on their number.
        params.bad_words = None
        # Upstream would require a server with a reasoning parser.
        params.thinking_token_budget = None
    request = _upstreams(self, request_id, prompt, params, *args, **options)
    if decided is None:
        decided = validator.decide_sampling(sampling, request.prompt_token_ids or [])
    attach(request.sampling_params, decided.with_answers(params.n))
    return request


def _new_adapter(
    validator: Validator | None, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[AdapterRequests, LoRARequest] | None:
    """Return what checks a request's adapter, and the adapter; None if there is nothing to check.

    Args:
        validator: None if the served model is not ours.
        args, options: arguments of `add_request` that follow the request's id.
    """
    adapter = options.get("lora_request") or (args[3] if len(args) > 3 else None)
    if validator is None or adapter is None or not validator.adapters.needs_check(adapter):
        return None
    return validator.adapters, adapter


@contextmanager
def _refusing_adapters() -> Iterator[None]:
    """Raise refusals of adapters as refusals of requests."""
    try:
        yield
    except AdapterError as error:
        raise AdapterRefused(error) from None
    except InvalidParameterError as error:
        raise RequestRefused(error) from None
    except Exception as error:
        refusal = adapter_requests.refusal_in(error)
        if refusal is None:
            raise
        raise AdapterRefused(refusal) from None


def _assign_request_id(request: EngineCoreRequest) -> None:
    """Run upstream's function, and check the request, which is registered next.

    Raises:
        RequestRefused: the engine could not decode the request. Its input thread ends at a message
            that it cannot decode, so such a request must not be sent.
    """
    _upstreams_ids(request)
    sampling = request.sampling_params
    if not isinstance(sampling, SamplingParams) or not is_decided(sampling):
        return
    try:
        encoded = MsgpackEncoder().encode(request)
        # The sampling parameters of a scoring request contain no values of a client.
        if sampling.extra_args[DECISION].score is None:
            MsgpackDecoder(EngineCoreRequest).decode(encoded)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestRefused(_unreadable(request, error)) from None


def _unreadable(request: EngineCoreRequest, error: Exception) -> InvalidParameterError:
    """Return the refusal for a request that cannot be encoded or decoded.

    The message of a decoder contains the path, such as `$[13]` or `$[3].stop[0]`; that of an
    encoder does not.
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
    """Run upstream's function of the offline engine, and remove a request that fails in it.

    Upstream registers a request before it sends it, and waits for every registered request.
    """
    with _refusing_adapters():
        unchecked = _new_adapter(validator_of(self.input_processor), args, options)
        if unchecked is not None:
            adapters, adapter = unchecked
            replacement = adapters.check(adapter, self.list_loras())
            if replacement is not None:
                self.add_lora(replacement)
                adapters.note(replacement)
    registered = self.output_processor.external_req_ids
    before = list(registered.get(request_id, ()))
    try:
        return _upstreams_add(self, request_id, *args, **options)
    except BaseException:
        new = [own_id for own_id in registered.get(request_id, ()) if own_id not in before]
        self.abort_request(new, internal=True)
        raise


async def _add_request_async(self: AsyncLLM, request: EngineCoreRequest, *args: Any) -> None:
    """Run upstream's function of a server's engine, and remove a request that fails in it."""
    try:
        await _upstreams_add_async(self, request, *args)
    except BaseException:
        await self.abort(request.request_id, internal=True)
        raise
