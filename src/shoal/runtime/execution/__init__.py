"""Running fragments: lowering, executors, schedulers, and runs inside one process."""
