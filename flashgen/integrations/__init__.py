"""Calls of other libraries, answered by attention()."""
