# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels of the LLaDA family; see `vllm_add_llada.cuda_kernels`."""
