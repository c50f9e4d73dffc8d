"""Where each state space lies in the generic address space."""

from __future__ import annotations

#: Generic address of the first byte of a state space (global addresses are generic ones).
WINDOWS: dict[str, int] = {
    "global": 0,
    "const": 0,
    "shared": 0x1_0000_0000_0000,
    "local": 0x2_0000_0000_0000,
    "param": 0x3_0000_0000_0000,
}
#: Bytes of one window.
WINDOW_BYTES = 0x1_0000_0000_0000


def split(address: int) -> tuple[str, int]:
    """(state space, address within it) of a generic address."""
    for name in ("param", "local", "shared"):
        if address >= WINDOWS[name]:
            return name, address - WINDOWS[name]
    return "global", address
