# SPDX-License-Identifier: Apache-2.0
"""The models that a server names: the served one, and adapters that come and go."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.diffusion.adapters.peft_files import is_below
from vllm.diffusion.api.adapter_requests import refusal_in
from vllm.diffusion.core.errors import AdapterError
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from vllm.diffusion.adapters.peft_files import AdapterReader
    from vllm.diffusion.api.validator import Validator

logger = init_logger(__name__)

_POLL_S = 0.005  # seconds between two questions whether an adapter has been read


class AdapterModels(OpenAIServingModels):
    """Upstream's list of models, whose adapters are staged before the engine installs them.

    Attributes:
        validator: checks the adapters that requests name.
        reader: checks the files of adapters; None if the server has no adapters.
        adapter_root: folder below which loads at run time may read; None for any.
        staging: held while an adapter is staged, because workers stage one at a time.
    """

    validator: Validator
    reader: AdapterReader | None
    adapter_root: str | None
    staging: asyncio.Lock

    async def load_lora_adapter(
        self, request: Any, base_model_name: str | None = None
    ) -> ErrorResponse | str:
        """Load an adapter on every rank of every replica, or replace one; or change nothing."""
        name, path = request.lora_name, request.lora_path
        async with self.lora_resolver_lock[name]:
            try:
                self._check_names(request)
                await asyncio.to_thread(self._check_files, name, path)
                before = self.lora_requests.get(name)
                adapter = LoRARequest(
                    name,
                    self.lora_id_counter.inc(1) if before is None else before.lora_int_id,
                    path,
                    load_inplace=before is not None,
                )
                await self._install(adapter)
            except AdapterError as error:
                field = str(error).partition(": ")[0]
                is_of_body = field in ("lora_name", "is_3d_lora_weight")
                return _refused(str(error), field if is_of_body else "lora_path")
            adapter.load_inplace = False
            if base_model_name is not None and self.is_base_model(base_model_name):
                adapter.base_model_name = base_model_name
            self.lora_requests[name] = adapter
            self.validator.adapters.note(adapter)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def resolve_lora(self, lora_name: str) -> LoRARequest | ErrorResponse:
        """Return an adapter by its name, loaded from where a resolver finds it if necessary."""
        async with self.lora_resolver_lock[lora_name]:
            known = self.lora_requests.get(lora_name)
            if known is not None:
                return known
            message = f"model: given {lora_name!r}; wanted a served name"
            status = HTTPStatus.NOT_FOUND
            for resolver in self.lora_resolvers if self.reader is not None else ():
                adapter = await resolver.resolve_lora(self.model_config.model, lora_name)
                if adapter is None:
                    continue
                adapter.lora_int_id = self.lora_id_counter.inc(1)
                try:
                    await self._install(adapter)
                except AdapterError as error:
                    message, status = str(error), HTTPStatus.BAD_REQUEST
                    continue
                self.lora_requests[lora_name] = adapter
                self.validator.adapters.note(adapter)
                return adapter
        return _refused(message, "model", status)

    async def unload_lora_adapter(self, request: Any) -> ErrorResponse | str:
        """Make an adapter unknown to new requests; its memory is free when no request has it."""
        name = request.lora_name
        async with self.lora_resolver_lock[name]:
            adapter = self.lora_requests.pop(name, None)
            if adapter is None:
                known = ", ".join(self.lora_requests) or "none"
                message = f"lora_name: given {name!r}; wanted one of: {known}"
                return _refused(message, "lora_name", HTTPStatus.NOT_FOUND)
            await self.engine_client.remove_lora(adapter.lora_int_id)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _check_names(self, request: Any) -> None:
        name = request.lora_name
        for field in ("lora_name", "lora_path"):
            if not getattr(request, field):
                raise AdapterError(f"{field}: given ''; wanted text")
        if not name.isprintable():  # it is written to logs and error messages
            raise AdapterError(
                f"lora_name: given {name!r}; wanted a name without control characters"
            )
        if self.reader is None:
            raise AdapterError(f"lora_name: given {name!r}; wanted none: start with enable_lora")
        if self.is_base_model(name):
            raise AdapterError(
                f"lora_name: given {name!r}; wanted another name: the served model has it"
            )
        if name in self.lora_requests and not request.load_inplace:
            raise AdapterError(
                f"lora_name: given {name!r}; wanted another name, or load_inplace: "
                "an adapter has it"
            )
        if request.is_3d_lora_weight:
            raise AdapterError(
                "is_3d_lora_weight: given true; wanted false: experts take no adapters"
            )

    def _check_files(self, name: str, path: str) -> None:
        if self.adapter_root is not None and not is_below(path, self.adapter_root):
            root = Path(self.adapter_root).resolve()
            raise AdapterError(
                f"lora_path: given {path!r}; wanted a folder below adapter_root {root}"
            )
        assert self.reader is not None
        self.reader.check(name, path)

    async def _install(self, adapter: LoRARequest) -> None:
        """Stage an adapter on all ranks, then install it everywhere.

        Raises:
            AdapterError: some rank cannot load it; no rank has changed.
        """
        name, number = adapter.lora_name, adapter.lora_int_id
        async with self.staging:
            await self._call_all("stage_adapter", name, number, adapter.lora_path)
            while None in (states := await self._call_all("staged_adapter", name)):
                await asyncio.sleep(_POLL_S)
            failures = [state for state in states if state]
            if failures:
                raise AdapterError(failures[0])
            try:
                await self.engine_client.add_lora(adapter)
            except Exception as error:
                await self._call_all("undo_load", number)
                refusal = refusal_in(error)
                if refusal is None:
                    raise
                raise refusal from None
            await self._call_all("forget_load")

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all workers of all replicas; return all results."""
        call: Any = self.engine_client.engine_core.call_utility_all_async
        replicas = await call("collective_rpc", method, None, args, None)
        return [result for workers in replicas for result in workers]


def _refused(message: str, field: str | None, status: HTTPStatus | None = None) -> ErrorResponse:
    is_missing = "wanted a folder with" in message
    if status is None:
        status = HTTPStatus.NOT_FOUND if is_missing else HTTPStatus.BAD_REQUEST
    kind = "NotFoundError" if status == HTTPStatus.NOT_FOUND else "BadRequestError"
    # Upstream's function would hide the path in the message.
    error = ErrorInfo(message=message, type=kind, param=field, code=status.value)
    return ErrorResponse(error=error)
