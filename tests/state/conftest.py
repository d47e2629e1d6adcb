"""What the tests of the state engine share."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small tests on few cores
