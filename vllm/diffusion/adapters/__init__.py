# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) that requests use instead of the served model.

An adapter adds `scale * B A x` to the product of some matrices of the checkpoint. The modules in
reading order: `matrices` names the matrices that an adapter may change, `peft_files` reads and
checks an adapter, `known_adapters` owns the adapters of a worker, `slot_memory` holds the adapters
that requests use, `adapted_rows` records which rows of a step use which slot,
`adapted_projection` adds the products, `lora_flags` reads the flags of the server.
"""
