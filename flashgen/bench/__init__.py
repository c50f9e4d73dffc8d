"""Benchmarks: flashgen beside its peers, interleaved in one run, every cell checked, raw numbers kept."""
