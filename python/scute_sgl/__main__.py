"""``python -m scute_sgl``: the scute command."""

import sys

from scute_sgl.cli import main

sys.exit(main())
