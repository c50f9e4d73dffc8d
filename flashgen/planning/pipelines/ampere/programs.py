"""The programs of pipeline ampere: all warps do the same, and copy tiles by cp.async for each other."""

from __future__ import annotations

from flashgen.planning.program import WARP, Axis, NamedBarrier, Party, Program, Ring, Role

_COMPUTE = (Party(role="compute", arrivals=0),)


def forward(warps: int, stages: int) -> Program:
    """A forward's: K and V go round, Q stays."""
    return _program(warps, *(_ring(name, f"a tile of {name.upper()}", stages, "STAGES") for name in ("k", "v")))


def backward(warps: int, stages: int, buffers: int, *, shares_p: bool, shares_ds: bool) -> Program:
    """A backward's main kernel: queries go round, and what warps exchange of P and dS."""
    exchanged = [("p", "P of a tile of queries")] * shares_p + [("ds", "dS of a tile of queries")] * shares_ds
    return _program(
        warps,
        _ring("q", "a tile of Q and its lse", stages, "STAGES"),
        _ring("d_o", "a tile of dO and its delta", stages, "STAGES"),
        *(_ring(name, carries, buffers, "BUFFERS") for name, carries in exchanged),
    )


def _program(warps: int, *rings: Ring) -> Program:
    why = "a stage is filled by all warps, and none reads what is overwritten next"
    meet = NamedBarrier(name="stage", id=0, warps=warps, roles=("compute",), why=why)
    return Program(
        roles=(Role(name="compute", warps=warps, threads=WARP * warps),), rings=rings, named_barriers=(meet,)
    )


def _ring(name: str, carries: str, stages: int, text: str) -> Ring:
    axis = Axis(size=stages, text=text, index="stage")
    return Ring(name=name, carries=carries, stages=axis, producers=_COMPUTE, consumers=_COMPUTE, freed="by barrier 0")
