# SPDX-License-Identifier: Apache-2.0
"""Diffusion language models on vLLM: the additions of Mosaic to upstream."""

__version__ = "0.3.0"
