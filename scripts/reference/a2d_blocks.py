# SPDX-License-Identifier: Apache-2.0
"""The block diffusion sampler of dllm for A2D models, one sequence at a time, written plainly.

Source: https://github.com/ZHZisZZ/dllm, `core/samplers/bd3lm.py`. The prompt is padded on the left
to whole blocks, and no position attends to the padding. One forward pass of the prefix stores its
keys and values. Then the forward passes of a block of masks compute the block alone.

Deviations from the source: quotas that do not divide give the remainder to the first steps, ties go
to the lowest position, the last block is always whole, a stop token only counts after the prompt,
and the answer ends after its first stop token. The forward passes that store keys and values do not
count.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from reference.block_loops import Decoded, Uniform, quotas
from reference.models import KeyValues, Reference

# Confidences and ranks: of masked positions in ascending order -> indices to commit.
Choose = Callable[[list[float], int], list[int]]
PADDING = 0  # a token id that nothing reads


def best(scores: list[float], quota: int) -> list[int]:
    """Return the `quota` highest scores."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:quota]


def above(threshold: float) -> Choose:
    """Return the choice of all scores above the threshold if these fill the quota."""

    def choose(scores: list[float], quota: int) -> list[int]:
        high = [i for i, score in enumerate(scores) if score > threshold]
        return high if len(high) >= quota else best(scores, quota)

    return choose


def bd3lm(
    model: Reference,
    prompt: Sequence[int],
    *,
    gen_length: int,
    block_length: int,
    mask_id: int,
    steps: int | None = None,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    uniform: Uniform | None = None,
    choose: Choose = best,
) -> Decoded:
    """Run the sampler; `steps` is the number of steps of a block, by default one per position."""
    num_pads = -len(prompt) % block_length
    tokens = [PADDING] * num_pads + [*prompt]
    end = len(tokens) + gen_length
    forwards, history = 0, []
    for start in range(len(tokens), end, block_length):
        past = _prefix(model, tokens, num_pads, block_length)
        tokens += [mask_id] * block_length
        for quota in quotas(block_length, steps or block_length):
            own = range(start, start + block_length)
            places = [p - num_pads for p in own]
            logits, _ = model.forward_with_kv(torch.tensor([tokens[start:]]), places, past)
            masked = [p for p in own if tokens[p] == mask_id]
            noise = None
            if temperature and uniform is not None:
                first = num_pads + len(prompt)
                noise = torch.stack([uniform(forwards, p - first) for p in masked])
            found, scores = _proposals(logits[0, [p - start for p in masked]], temperature, noise)
            forwards += 1
            for index in choose(scores, quota):
                tokens[masked[index]] = found[index]
            history.append(tokens[num_pads + len(prompt) : end])
            if mask_id not in tokens[start:]:
                break
        if any(token in stop_ids for token in tokens[max(start, num_pads + len(prompt)) :]):
            break
    answer = tokens[num_pads + len(prompt) : end]
    stops = [i for i, token in enumerate(answer) if token in stop_ids]
    return Decoded(answer[: stops[0] + 1] if stops else answer, forwards, history)


def _prefix(
    model: Reference, tokens: Sequence[int], num_pads: int, block_length: int
) -> KeyValues | None:
    """Return keys and values of the tokens behind the padding, with blocks from its start."""
    block = torch.arange(len(tokens)) // block_length
    sees = block[:, None] >= block[None, :]
    sees[:, :num_pads] = False
    real = slice(num_pads, None)
    ids = torch.tensor([list(tokens[real])])
    places = range(len(tokens) - num_pads)
    return model.forward_with_kv(ids, places, None, sees[real, real])[1]


def _proposals(
    logits: Tensor, temperature: float, uniform: Tensor | None
) -> tuple[list[int], list[float]]:
    """Return the most likely or a drawn token of each row [R, V], and its clean probability."""
    drawn = logits.double()
    if uniform is not None:  # Gumbel noise
        drawn = drawn.exp() / (-torch.log(uniform.double())) ** temperature
    tokens = drawn.argmax(dim=-1)
    scores = torch.softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), scores.tolist()
