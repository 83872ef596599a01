"""`python -m trace_jax`: the command line."""

import sys

from trace_jax.cli.app import main

sys.exit(main())
