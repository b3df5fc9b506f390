"""The client of a service's REST interface: api.client, under the name of the package that people install.

It is loaded from above on first use, as what `import labeler` offers is.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from api.client import *  # noqa: F403  # its own names, and no others
else:
    sys.modules[__name__] = importlib.import_module("api.client")
