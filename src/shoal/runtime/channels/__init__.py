"""Channels between fragments: flow control, in-process hand-over, shared memory."""
