# SPDX-License-Identifier: Apache-2.0
"""The server's own web pages: one to send requests and watch them, one for the engine's status.

The pages are plain HTML, CSS and JavaScript in `static/`. They are served unchanged, without a
build step and without resources from other hosts.
"""
