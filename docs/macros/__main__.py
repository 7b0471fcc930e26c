# SPDX-License-Identifier: Apache-2.0
"""Keep the curve of a configuration: PYTHONPATH=docs python -m macros NAME FOLDER FOLDER ..."""

import sys
from pathlib import Path

from .curves import keep

print(keep(sys.argv[1], [Path(folder) for folder in sys.argv[2:]]))
