"""Credentials and kinds of paths."""
