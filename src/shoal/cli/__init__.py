"""The `shoal` command, and the pages it writes."""
