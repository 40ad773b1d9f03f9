"""`python -m shoal` is the `shoal` command."""

from shoal.cli.entry import entry

entry()
