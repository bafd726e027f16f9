# SPDX-License-Identifier: Apache-2.0
"""Checks of the adapters that requests name, before the engine receives the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.core.errors import AdapterError, InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.diffusion.adapters.peft_files import AdapterReader
    from vllm.lora.request import LoRARequest


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

    def check(self, request: LoRARequest, known: Collection[int]) -> None:
        """Check an adapter that is new to this process, without reading its tensors.

        Args:
            request: names the adapter.
            known: numbers of the adapters that the engine knows. Their files may be gone.

        Raises:
            AdapterError: another adapter has its number, or it cannot be served.
        """
        number, name = request.lora_int_id, request.lora_name
        other, _ = self._checked.get(number, (name, ""))
        if number in known and other != name:
            raise AdapterError(
                f"lora_int_id: given {number} for {name!r}; wanted another number: "
                f"it is that of {other!r}"
            )
        has_files = number not in known or request.load_inplace
        if has_files and self._reader is not None and not hasattr(request, "lora_tensors"):
            self._reader.check(name, request.lora_path)
        self.note(request)

    def note(self, request: LoRARequest) -> None:
        """Record that an adapter was checked."""
        self._checked[request.lora_int_id] = request.lora_name, request.lora_path


_FAILED = "Call to add_lora method failed: "  # upstream's text before an error of the engine


def refusal_in(error: Exception) -> AdapterError | None:
    """Return an engine's refusal of an adapter, which arrives as an error of upstream."""
    text = str(error)
    return AdapterError(text.removeprefix(_FAILED)) if text.startswith(_FAILED) else None
