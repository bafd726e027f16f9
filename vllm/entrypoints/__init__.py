# SPDX-License-Identifier: Apache-2.0
"""Hinge of the sub-package: this folder first, upstream's folder second."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
