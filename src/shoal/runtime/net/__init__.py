"""Channels between hosts: framing, handshake, connections."""
