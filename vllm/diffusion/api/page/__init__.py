# SPDX-License-Identifier: Apache-2.0
"""The server's own web pages: one to ask and watch, one that shows what the engine is doing.

Plain HTML, CSS and JavaScript in `static/`, served as they are: nothing is built, and nothing is
loaded from another host.
"""
