# SPDX-License-Identifier: Apache-2.0
"""Parts of `make_tiny_model.py`, which trains a tiny checkpoint of a released model family.

facts.py         facts that the model is taught              (no torch) conversations.py how
questions are asked: frames, turns, system lines (no torch) family.py        interface of a model
family                 (no torch) llada.py, dream.py, llada_moe.py, llada2.py, sdar.py,
fast_dllm.py, nemotron.py, llada22.py, idlm.py
                 the families: configuration, network, chat template
decoder.py       the transformer that all families except LLaDA share layers.py        parts that
all networks share tokenizer.py     byte-level BPE tokenizer files training.py      masked-diffusion
training, the same for every family decoding.py      the families' own decoding loops, to verify the
result verification.py  share of right answers of a written checkpoint checkpoint.py    safetensors
shards and JSON files of a checkpoint directory cache.py         manifest: is a directory complete
and made by these sources? (no torch)
"""
