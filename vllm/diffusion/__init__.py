# SPDX-License-Identifier: Apache-2.0
"""Diffusion language models on vLLM: what the overlay adds to upstream."""

__version__ = "0.2.0"
