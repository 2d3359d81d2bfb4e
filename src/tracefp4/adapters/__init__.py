"""Connections to other frameworks; nothing below this package imports them."""
