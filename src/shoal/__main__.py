"""The `shoal` command, which is also `python -m shoal`."""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup has it ignored
    # Nothing is open yet: Ctrl-C during the imports below is no traceback.
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))

from shoal.cli.entry import entry

if __name__ == "__main__":
    entry()
