# SPDX-License-Identifier: Apache-2.0
"""Stop strings of requests that may call functions: they apply to text, never within a call.

An answer that begins with "<" is a call, and no other answer begins like this. A stop string
within a call's name, arguments or tags would truncate the call so that no client can parse it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.request.decision import DECISION, is_decided
from vllm.v1.engine.detokenizer import (
    FastIncrementalDetokenizer,
    IncrementalDetokenizer,
    SlowIncrementalDetokenizer,
    uses_fast_detokenizer,
)

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

_upstreams = IncrementalDetokenizer.from_new_request


class _OutsideCalls:
    """Detokenizer that ignores stop strings once the text is a call."""

    output_text: str = ""
    _stop: list[str]

    @property
    def stop(self) -> list[str]:
        return [] if self.output_text.startswith("<") else self._stop

    @stop.setter
    def stop(self, strings: list[str]) -> None:
        self._stop = strings


class _Fast(_OutsideCalls, FastIncrementalDetokenizer):
    pass


class _Slow(_OutsideCalls, SlowIncrementalDetokenizer):
    pass


def install() -> None:
    """Use these detokenizers, in this process, for requests that may call functions."""
    IncrementalDetokenizer.from_new_request = staticmethod(_from_new_request)


def _from_new_request(tokenizer: Any, request: EngineCoreRequest) -> IncrementalDetokenizer:
    params = request.sampling_params
    if tokenizer is None or params is None or not params.stop or not is_decided(params):
        return _upstreams(tokenizer, request)
    guide = params.extra_args[DECISION].guide
    if guide is None or not guide.may_call:
        return _upstreams(tokenizer, request)
    return (_Fast if uses_fast_detokenizer(tokenizer) else _Slow)(tokenizer, request)
