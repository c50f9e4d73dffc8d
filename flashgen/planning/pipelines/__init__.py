"""Kernel families, a folder each and in it a file for each pass: candidates, what they cost, how long they take."""
