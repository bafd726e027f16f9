# SPDX-License-Identifier: Apache-2.0
"""Memory of weights that can be released while nothing runs, and comes back where it was.

```
addresses of the range    0 ............... used
awake                     | tensors of weights |      backed by memory
asleep                    |     not backed     |      contents on the host, or discarded
```

The tensors stay, so objects that hold them or their addresses (layers, CUDA graphs) stay valid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.ops import arena as vmm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

ALIGNMENT = 512  # bytes
CHUNK_BYTES = 32 << 20  # bytes mapped at a time; all chunks are mapped and released together
MAX_UNUSED_BYTES = 1 << 30  # maximum bytes that PyTorch may cache after weights have moved
_NAN_BYTE = 0xFF  # four such bytes are NaN in fp32, two in bf16, one in e4m3


class WeightMemory:
    """Memory of weights that cannot be released: sleep only discards their contents.

    Args:
        model: the loaded model; its own buffers, which are computed, stay as they are.
    """

    num_bytes = 0  # bytes that are released during sleep

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def suspend(self, *, keeps: bool) -> None:
        """Put the weights to sleep; without `keeps` their contents are lost."""
        if not keeps:
            for _, _, weight in _weights(self._model):
                weight.view(-1).view(torch.uint8).fill_(_NAN_BYTE)

    def resume(self) -> None:
        """Wake the weights up, with the contents that were kept."""


class ArenaWeights(WeightMemory):
    """Memory of weights in a range of a GPU's addresses.

    Args:
        model: the loaded model, whose weights move there; no other object may hold them yet.
        device: a CUDA device.

    Raises:
        ServerConfigError: this machine does not support such memory.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model)
        if not vmm.is_built():
            raise ServerConfigError(
                "enable_sleep_mode: given true, which needs vmm_allocator; "
                "build it with scripts/setup.sh"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        card = torch.cuda.get_device_properties(index).total_memory
        self._arena = vmm.Arena(card, device=index, chunk_bytes=CHUNK_BYTES)
        self._host = torch.empty(0, dtype=torch.uint8)  # pinned once, because pinning takes long
        self._keeps = False
        end, moved, unused_bytes = 0, dict[int, torch.Tensor](), 0
        for owner, name, weight in _weights(model):
            place = moved.get(weight.data_ptr())
            if place is None:
                self._arena.grow(end + weight.nbytes)
                place = self._arena.tensor(end, tuple(weight.shape), weight.dtype, holds=False)
                place.copy_(weight)
                moved[weight.data_ptr()] = moved[place.data_ptr()] = place
                end += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
                unused_bytes += weight.nbytes
            if name in owner._parameters:
                owner._parameters[name].data = place  # type: ignore[union-attr]
            else:
                owner._buffers[name] = place
            # PyTorch caches the previous memory of the weights.
            if unused_bytes > MAX_UNUSED_BYTES:
                unused_bytes = 0
                torch.cuda.empty_cache()
        self.num_bytes = end

    def suspend(self, *, keeps: bool) -> None:
        self._keeps = keeps
        if keeps:
            if not len(self._host):
                self._host = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(self._whole())
        self._arena.shrink(0)
        self._arena.trim()

    def resume(self) -> None:
        self._arena.grow(self.num_bytes)
        if self._keeps:
            self._whole().copy_(self._host)
            torch.cuda.synchronize()

    def _whole(self) -> torch.Tensor:
        """Return all weights as bytes."""
        return self._arena.tensor(0, (self.num_bytes,), torch.uint8, holds=False)


def _weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield each weight tensor with its module and its name there; shared tensors repeat."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, name, parameter.data
        for name, buffer in module.named_buffers(recurse=False):
            if path and buffer.numel():
                yield module, name, buffer
