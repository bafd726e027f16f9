# SPDX-License-Identifier: Apache-2.0
"""Cases for the kernels of joint choices, several requests per step, compared with the host."""

from unittest import mock

import numpy as np
import torch

from tests.guided.support import language_of
from vllm.diffusion.core.samples import Samples
from vllm.diffusion.guided.joint import Joint, choose_all, gather, read_all
from vllm.diffusion.guided.open_window import FREE, OPEN, OpenWindow
from vllm.diffusion.guided.regex import regex

LETTERS = tuple(bytes([byte]) for byte in b'abcdefgh1234"{}: ,')
TOKENS: tuple[bytes | None, ...] = (
    *LETTERS,
    *(a + b for a in LETTERS for b in LETTERS[:9]),
    *(a + b + c for a in LETTERS[:6] for b in LETTERS[:6] for c in LETTERS[:6]),
    *(None for _ in range(40)),
)
PATTERNS = ("([a-d]{1,3}, )*[e-h]+", '\\{"a": [1-4]{2,9}, "b": "[a-h ]*"\\}', "(ab|cd|1)*2?")


def joints(seed: int, temperature: float, num_requests: int) -> list[Joint]:
    """Return requests of different languages, lengths and progress."""
    draw = np.random.default_rng(seed)
    results = []
    for index, pattern in enumerate(PATTERNS[:num_requests]):
        language = language_of(regex(pattern), TOKENS)
        length = 12 + 5 * index
        kinds = np.full(length, OPEN, dtype=np.int32)
        if index == 1:
            kinds[0] = language.class_of_token[TOKENS.index(b"{")]
            kinds[5:7] = FREE
        left = int(draw.integers(-2, 6))
        window = OpenWindow(3 * index, 0, kinds, left)
        own = temperature if index != 2 or temperature == 0 else temperature / 2
        joint = Joint(
            language,
            window,
            own,
            seed=2**63 + seed,
            step=4,
            is_tempered=index == 1,
            sets_scores=index != 2,
            excluded=(len(TOKENS) - 2,) if index == 0 else (),
        )
        results.append(joint)
    return results


def chosen(
    made: list[Joint], device: str, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of the step, [3, columns] on the host, and the sum of each choice's logits."""
    generator = torch.Generator().manual_seed(seed)
    counts = [joint.num_rows for joint in made]
    ends = (np.cumsum(counts) + 2 * np.arange(len(made))).tolist()
    gather(made, ends)
    logits = 4 * torch.randn(ends[-1] + 2, len(TOKENS), generator=generator)
    logits[::5, ::3] = -torch.inf
    logits = logits.to(dtype)
    sampled = torch.full((3, len(logits)), 0.25, dtype=torch.float64)
    sampled, logits = sampled.to(device), logits.to(device)
    middle = ends[0] - counts[0] // 2
    for part in (slice(0, middle), slice(middle, len(logits))):
        readers = []
        for joint, count, end in zip(made, counts, ends, strict=True):
            begin, stop = max(end - count, part.start), min(end, part.stop)
            if begin < stop:
                at = np.flatnonzero(joint.window.kinds == OPEN) + joint.window.first
                at = torch.from_numpy(at[begin - end + count :][: stop - begin])
                readers.append((joint, slice(begin - part.start, stop - part.start), at))
        read_all(logits[part], readers)
    choose_all(Samples(sampled), made)
    sampled = sampled.cpu()
    taken = logits.cpu().double().gather(1, sampled[0].long()[:, None])[:, 0]
    worth = [taken[end - j.num_rows : end].sum() for j, end in zip(made, ends, strict=True)]
    return sampled, torch.stack(worth)


def check(
    device: str,
    seed: int,
    temperature: float,
    dtype: torch.dtype = torch.float32,
    num_requests: int = len(PATTERNS),
) -> None:
    """Check that kernels choose strings as good as the host's; equally good ones may differ."""
    actual, worth = chosen(joints(seed, temperature, num_requests), device, seed, dtype)
    with mock.patch("vllm.diffusion.guided.joint.IS_INTERPRETED", False):
        on_host = chosen(joints(seed, temperature, num_requests), "cpu", seed, dtype)
    wanted, wanted_worth = on_host
    if dtype == torch.bfloat16 and temperature == 0:
        torch.testing.assert_close(worth, wanted_worth, rtol=1e-6, atol=1e-6)
        return
    torch.testing.assert_close(actual[[0, 2]], wanted[[0, 2]], rtol=0, atol=0)
    torch.testing.assert_close(actual[1], wanted[1], rtol=5e-4, atol=1e-7)
