# SPDX-License-Identifier: Apache-2.0
"""Rebuilding upstream's handlers as subclasses: the only place that changes their class."""

from __future__ import annotations

from copy import copy
from typing import Any


def rebuild_as(handler: Any, kind: type[Any], **attributes: Any) -> Any:
    """Return a copy of a handler as an instance of its subclass `kind`, with changed attributes.

    The constructor of `kind` is not called, because it requires all arguments of upstream's
    server.
    """
    rebuilt = copy(handler)
    rebuilt.__class__ = kind
    vars(rebuilt).update(attributes)
    return rebuilt
