# SPDX-License-Identifier: Apache-2.0
"""Scheduler, worker and model runner: one engine step is one denoising step of all requests."""
