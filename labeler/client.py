"""The client of a service's REST interface: api.client, re-exported under the name of the installed package.

It is imported from the higher package on first use, like everything that `import labeler` offers.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from api.client import *  # noqa: F403  # its own names, and no others
else:
    sys.modules[__name__] = importlib.import_module("api.client")
