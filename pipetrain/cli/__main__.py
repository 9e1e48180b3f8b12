"""`python -m pipetrain.cli ARGV`, which is `pipetrain ARGV` where the command is not on the PATH."""

import sys

from pipetrain.cli.main import command

sys.exit(command())
