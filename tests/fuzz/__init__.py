"""Random specs against an evaluator that shares no code with the compiler; `python -m tests.fuzz --help`."""

import sys
from pathlib import Path

# Helpers of the tests beside this package, which pytest finds by itself.
if (_tests := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(_tests)
