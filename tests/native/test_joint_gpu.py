# SPDX-License-Identifier: Apache-2.0
"""The kernels of joint choices give the same choices as the host."""

import pytest
import torch

from tests.guided.joint_kernels import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
@pytest.mark.parametrize("seed", range(4))
def test_kernels_choose_what_the_host_does(
    seed: int, temperature: float, dtype: torch.dtype
) -> None:
    check("cuda", seed, temperature, dtype)
