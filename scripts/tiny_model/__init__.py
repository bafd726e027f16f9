# SPDX-License-Identifier: Apache-2.0
"""Parts of `make_tiny_model.py`: a tiny, really trained checkpoint of a released model family.

facts.py         what the model is taught                   (no torch)
family.py        what a model family must provide           (no torch)
llada.py         the LLaDA family: configuration, network, chat template
tokenizer.py     byte-level BPE tokenizer files
training.py      masked-diffusion training, the same for every family
decoding.py      the plain semi-autoregressive loop, to verify the result
verification.py  share of right answers of a written checkpoint
checkpoint.py    safetensors shards and JSON files of a checkpoint directory
cache.py         manifest: is a directory complete and made by these sources? (no torch)
"""
