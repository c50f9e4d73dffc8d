"""Kernels of wgmma and TMA, whose warps have roles: sm_90a."""
