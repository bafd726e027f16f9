# SPDX-License-Identifier: Apache-2.0
"""Rebuilds handlers of upstream's server: the only place that changes their class."""

from __future__ import annotations

from copy import copy
from typing import Any


def rebuild_as(handler: Any, kind: type[Any], **attributes: Any) -> Any:
    """Return a copy of a handler, which keeps the server's arguments.

    Its constructor is not called: it wants all that upstream's server knows when it makes one.

    Args:
        handler: upstream's, or one of ours; it is left as it is.
        kind: class of the copy, derived from upstream's.
        attributes: what differs, such as `engine_client`, which runs the handler's requests.
    """
    made = copy(handler)
    made.__class__ = kind
    vars(made).update(attributes)
    return made
