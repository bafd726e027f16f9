# SPDX-License-Identifier: Apache-2.0
"""Kernels of the LLaDA family; see `vllm_add_llada.cuda_kernels`."""
