"""Entry point of ``python -m torchrelay.launch``."""

from __future__ import annotations

import sys

from torchrelay.launch.supervise import main

if __name__ == "__main__":
    sys.exit(main())
