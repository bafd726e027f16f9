# SPDX-License-Identifier: Apache-2.0
"""Rebuilding upstream's handlers as subclasses: the only place that changes their class."""

from __future__ import annotations

from copy import copy
from typing import Any


def rebuild_as(handler: Any, kind: type[Any], **attributes: Any) -> Any:
    """Return a copy of a handler as an instance of `kind`, with the handler's attributes.

    The constructor of `kind` is not called, because it requires all arguments of upstream's
    server.

    Args:
        handler: upstream's handler, or one of ours; it is not changed.
        kind: class of the copy, derived from upstream's.
        attributes: attributes to replace, such as `engine_client`, which runs the requests.
    """
    rebuilt = copy(handler)
    rebuilt.__class__ = kind
    vars(rebuilt).update(attributes)
    return rebuilt
