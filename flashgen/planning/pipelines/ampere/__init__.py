"""Kernels of mma.sync and cp.async, which every architecture from sm_80 on has."""
