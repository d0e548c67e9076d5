"""Whether Triton's interpreter runs the kernels. Needs neither torch nor Triton."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
