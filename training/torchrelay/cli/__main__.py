"""``python -m torchrelay.cli``: the same as the ``torchrelay`` command."""

import sys

from torchrelay.cli import main

sys.exit(main())
