# SPDX-License-Identifier: Apache-2.0
"""What an engine's process needs, imported before it is forked (`vllm.diffusion.forkserver`)."""

import gc

import setproctitle

import vllm.diffusion.engine.scheduler
import vllm.diffusion.engine.worker
import vllm.v1.engine.core
import vllm.v1.executor.uniproc_executor  # noqa: F401

# It finds its place in memory by the environment, which a fork replaces.
setproctitle.getproctitle()
# The garbage collector of a fork leaves alone, and so shares, what is here now.
gc.collect()
gc.freeze()
