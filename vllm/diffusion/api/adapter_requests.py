# SPDX-License-Identifier: Apache-2.0
"""The adapters that requests name: checks before the engine receives a request, HTTP requests."""

from __future__ import annotations

from contextvars import ContextVar
from copy import copy
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm import envs as upstream_envs
from vllm.diffusion.core.errors import AdapterError, InvalidParameterError
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm.diffusion.adapters.peft_files import AdapterReader
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels


class AdapterRequests:
    """The adapters that this process has checked.

    Args:
        reader: checks the files of adapters; None if the engine has no adapters.
    """

    def __init__(self, reader: AdapterReader | None) -> None:
        self._reader = reader
        self._checked: dict[int, tuple[str, str]] = {}  # name and path, by number

    def needs_check(self, request: LoRARequest) -> bool:
        """Return whether an adapter is new to this process.

        Raises:
            InvalidParameterError: the engine has no adapters.
        """
        if self._reader is None:
            wanted = "wanted none: start with enable_lora"
            raise InvalidParameterError("lora_request", request.lora_name, wanted)
        named = request.lora_name, request.lora_path
        return request.load_inplace or self._checked.get(request.lora_int_id) != named

    def check(self, request: LoRARequest, known: Collection[int]) -> LoRARequest | None:
        """Check an adapter that is new to this process, without reading its tensors.

        Args:
            request: names the adapter; its `load_inplace` acts once.
            known: numbers of the engine's adapters, whose files may be gone.

        Returns:
            an adapter that the engine must load first, and that is noted then; or None. The engine
            refuses it if another adapter has its number.

        Raises:
            AdapterError: it cannot be served.
        """
        number, name = request.lora_int_id, request.lora_name
        other, _ = self._checked.get(number, (name, ""))
        has_files = number not in known or request.load_inplace
        if has_files and self._reader is not None and not hasattr(request, "lora_tensors"):
            self._reader.check(name, request.lora_path)
        # The number may have been given to another adapter since this process noted it.
        if not request.load_inplace and not (number in known and other != name):
            self.note(request)
            return None
        replacement = copy(request)
        request.load_inplace = False
        return replacement

    def note(self, request: LoRARequest) -> None:
        """Record that an adapter was checked."""
        self._checked[request.lora_int_id] = request.lora_name, request.lora_path


_FAILED = "Call to add_lora method failed: "  # upstream's text before an error of the engine


def refusal_in(error: Exception) -> AdapterError | None:
    """Return an engine's refusal of an adapter, which arrives as an error of upstream."""
    text = str(error)
    return AdapterError(text.removeprefix(_FAILED)) if text.startswith(_FAILED) else None


# The adapter that the HTTP request of this task names as its model; None for the served model.
_requested: ContextVar[LoRARequest | None] = ContextVar("_requested", default=None)


async def choose_model(models: OpenAIServingModels, name: Any) -> None:
    """Set the adapter of this task's HTTP request by the model that it names.

    Args:
        models: the served models.
        name: `model` of the body, if it has one.

    Raises:
        VLLMNotFoundError: HTTP 404, for a name that is not served.
        VLLMValidationError: HTTP 400, for an adapter that a resolver finds and nobody can serve.
    """
    _requested.set(None)
    if not isinstance(name, str) or not name or models.is_base_model(name):
        return
    adapter = models.lora_requests.get(name)
    if adapter is None and models.lora_resolvers:
        resolved = await models.resolve_lora(name)
        if isinstance(resolved, LoRARequest):
            adapter = resolved
        elif resolved.error.code == HTTPStatus.BAD_REQUEST:
            raise VLLMValidationError(resolved.error.message)
    if adapter is None and upstream_envs.VLLM_SKIP_MODEL_NAME_VALIDATION:
        return
    if adapter is None:
        served = [model.name for model in models.base_model_paths]
        names = ", ".join([*served, *models.lora_requests])
        raise VLLMNotFoundError(f"model: given {name!r}; wanted one of: {names}")
    _requested.set(adapter)


def requested_adapter() -> LoRARequest | None:
    """Return the adapter of this task's HTTP request; None if it names the served model."""
    return _requested.get()


def answered_model(served: Sequence[str]) -> str:
    """Return the name for `model` of an answer: that of the adapter, or the first served name."""
    adapter = _requested.get()
    return served[0] if adapter is None else str(adapter.lora_name)
