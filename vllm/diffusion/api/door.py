# SPDX-License-Identifier: Apache-2.0
"""The door: a request is decided completely before it enters the engine.

Upstream offers two hooks while it processes a request, one after the other on one thread: the
parameter validator of an engine's own `logits_processors` list, which knows the engine but not the
prompt, and `Platform.validate_request`, which knows the prompt but not the engine. The first marks
the parameters as ours, the second checks them with the prompt. So every route and the offline
`LLM` refuse a bad request in the same words, and engines of other models are left alone.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from vllm.diffusion.config import decide, served_model
from vllm.diffusion.engine.sizes import demand_of, make_planner
from vllm.diffusion.errors import ActivationBudgetError, InvalidParameterError
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.diffusion.memory import Planner
    from vllm.diffusion.params import DiffusionParams, ServedModel

_marked = threading.local()
_installed: list[Door] = []  # the door of this process's newest diffusion engine


class DiffusionParamsValidator(LogitsProcessor):
    """Never instantiated: upstream calls `validate_params` for each request of our engines."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        _marked.params = sampling_params


class RequestRefused(VLLMValidationError):
    """HTTP 400; the message names the field already, so nothing is appended to it.

    Attributes:
        reason: how it is counted: the field at fault, or `memory` for steps that never fit into it.
    """

    def __init__(self, error: InvalidParameterError) -> None:
        super().__init__(str(error), parameter=error.field)
        self.reason = "memory" if isinstance(error, ActivationBudgetError) else error.field

    def __str__(self) -> str:
        return str(self.args[0])


class Door:
    """Decides requests for one engine configuration."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._model: ServedModel | None = None
        self._planner: Planner | None = None

    @property
    def model(self) -> ServedModel:
        """Read at first use: it needs the tokenizer, which upstream loads later."""
        if self._model is None:
            self._model = served_model(self._vllm_config)
        return self._model

    def learn_budget(self, budget_bytes: int) -> None:
        """From here on, refuse what does not fit into so much activation memory."""
        self._planner = make_planner(self._vllm_config, budget_bytes)

    def decide(self, sampling_params: Any, prompt_token_ids: list[int]) -> DiffusionParams:
        """The request's parameters.

        Raises:
            RequestRefused: naming the field, the given and the wanted value.
        """
        try:
            decided = decide(sampling_params, self.model, prompt_token_ids)
            if self._planner is not None:
                self._planner.check(demand_of(decided, len(prompt_token_ids)))
            return decided
        except InvalidParameterError as error:
            raise RequestRefused(error) from None


def install(vllm_config: VllmConfig, platform: Any) -> None:
    """Put a door on this process's platform object (its class stays as it is)."""
    door = Door(vllm_config)
    upstream: Callable[..., None] = type(platform).validate_request

    def validate_request(processed_inputs: Any, sampling_params: Any) -> None:
        upstream(processed_inputs, sampling_params)
        if getattr(_marked, "params", None) is sampling_params:
            _marked.params = None
            door.decide(sampling_params, processed_inputs.get("prompt_token_ids") or [])

    platform.validate_request = validate_request
    _installed[:] = [door]


def current_door() -> Door | None:
    """The door of this process's diffusion engine, if it has one."""
    return next(iter(_installed), None)
