"""cos and sin of a rotary embedding beside q and k: which of them are whose, and what they make of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flashgen.errors import LaunchError, shown
from flashgen.ops.layouts import check_memory, stacked
from flashgen.planning.quantize import ANGLE_BYTES, Angles

#: What users may give for q and k: one tensor for both, or two, of which None stands for a tensor that does not turn.
Given = torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None

_DTYPES = {getattr(torch, name): name for name in ANGLE_BYTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """cos and sin [batch or 1, rows, columns] of one tensor's rows: columns are half of head_dim, or all of it where a
    pair's two have the same angle.  Columns of two halves turn together, or `interleaved` ones side by side."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def angles(self, head_dim: int) -> Angles:
        """How kernels read them: of two halves the first has all angles."""
        repeated = self.interleaved and self.cos.shape[-1] == head_dim
        return Angles(dtype=_DTYPES[self.cos.dtype], interleaved=self.interleaved, repeated=repeated)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, heads, rows, head_dim] in float32 as kernels turn it, each product rounded by itself."""
        half = x.shape[-1] // 2
        cos, sin = (self._of_pairs(each, half).float().unsqueeze(1) for each in (self.cos, self.sin))
        x = x.float()
        a, b = (x[..., 0::2], x[..., 1::2]) if self.interleaved else (x[..., :half], x[..., half:])
        turned = a * cos - b * sin, b * cos + a * sin
        return torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)

    def of(self, b: int, rows: int) -> Rope:
        """Those of the first rows of one sequence."""
        cos, sin = (x[b : b + 1] if x.shape[0] > 1 else x for x in (self.cos, self.sin))
        return replace(self, cos=cos[:, :rows], sin=sin[:, :rows])

    def at(self, sequence: torch.Tensor, position: torch.Tensor) -> Rope:
        """Those of rows that sit at positions of sequences behind each other; of the nearest for one outside."""
        cos, sin = (
            x[sequence if x.shape[0] > 1 else 0, position.clamp(0, x.shape[1] - 1)].unsqueeze(0)
            for x in (self.cos, self.sin)
        )
        return replace(self, cos=cos, sin=sin)

    def _of_pairs(self, each: torch.Tensor, half: int) -> torch.Tensor:
        """The angles of pairs, once each."""
        if each.shape[-1] == half:
            return each
        return each[..., ::2] if self.interleaved else each[..., :half]

    @property
    def strides(self) -> dict[str, int]:
        """Those of batches and rows, by the names that kernels have for them."""
        named = (("cos", self.cos), ("sin", self.sin))
        return {
            f"{name}_{of}": stride if size > 1 else 0
            for name, x in named
            for of, stride, size in zip(("batch", "row"), x.stride(), x.shape, strict=False)
        }


def checked(
    cos: Given,
    sin: Given,
    interleaved: object,
    q: torch.Tensor,
    k: torch.Tensor,
    joined: tuple[tuple[int, int], tuple[int, int]] | None = None,
) -> tuple[Rope | None, Rope | None]:
    """Those of q and of k, or LaunchError for what is wrong with them; `joined` are the sequences of each, where they
    lie behind each other, and the most rows that one has."""
    if not isinstance(interleaved, bool):
        raise LaunchError(f"interleaved is {shown(interleaved)}: it is True or False")
    if cos is None and sin is None:
        if interleaved:
            raise LaunchError("interleaved is True, and there are no cos and sin\n  nearest: interleaved=False")
        return None, None
    pairs = {"cos": of_each("cos", cos), "sin": of_each("sin", sin)}
    found: list[Rope | None] = []
    for i, (name, x) in enumerate((("q", q), ("k", k))):
        of_x = pairs["cos"][i], pairs["sin"][i]
        if of_x[0] is None and of_x[1] is None:
            found.append(None)
            continue
        most = None if joined is None else joined[i]
        of_cos, of_sin = (_check(said, each, name, x, most) for said, each in zip(("cos", "sin"), of_x, strict=True))
        if of_cos.shape[1:] != of_sin.shape[1:] or of_cos.dtype != of_sin.dtype:
            raise LaunchError(
                f"cos is {_said(of_cos)} and sin {_said(of_sin)} beside {name}: they have one shape and one dtype"
            )
        # No row turns where there is none.
        turns = x.shape[2] and (joined is None or joined[i][1])
        found.append(Rope(cos=of_cos, sin=of_sin, interleaved=interleaved) if turns else None)
    return found[0], found[1]


def of_each(name: str, given: Any) -> tuple[Any, Any]:
    """What was given for q and for k."""
    if isinstance(given, (tuple, list)):  # PyTorch 2.6 compiles no union of types
        if len(given) != 2:
            raise LaunchError(
                f"{name} has {len(given)} tensors: it is one for q and k, or two\n  nearest: {name}=(of q, of k)"
            )
        return given[0], given[1]
    return given, given


def _said(x: torch.Tensor) -> str:
    return f"{list(x.shape)} of {str(x.dtype).removeprefix('torch.')}"


def _check(said: str, given: object, name: str, x: torch.Tensor, joined: tuple[int, int] | None) -> torch.Tensor:
    """cos or sin of x as [batch or 1, rows, columns]; LaunchError where it does not fit x [batch, heads, rows,
    head_dim], or the positions of so many sequences of at most so many rows (`joined`)."""
    batch, _, rows, head_dim = x.shape
    axes = "[batch, seqlen, ...]"
    if joined is not None:
        (batch, rows), axes = joined, f"[sequences = {joined[0]}, positions, ...]"
    wanted = f"[{rows}, {head_dim // 2}] or [{rows}, {head_dim}], or {axes} of these"
    if not isinstance(given, torch.Tensor):
        other = "sin" if said == "cos" else "cos"
        raise LaunchError(f"{said} of {name} is {shown(given)}, and {other} is given: they are tensors {wanted}")
    check_memory(said, said, given, "quantize", nested=stacked(said))
    if given.dtype not in _DTYPES:
        raise LaunchError(
            f"{said} is {str(given.dtype).removeprefix('torch.')}: it is float32, bfloat16 or float16\n"
            f"  nearest: {said}.float()"
        )
    if given.device != x.device:
        raise LaunchError(f"{said} is on {given.device} and {name} on {x.device}\n  nearest: {said}.to({name}.device)")
    whole = given.detach().unsqueeze(0) if given.dim() == 2 else given.detach()
    if whole.dim() != 3 or whole.shape[0] not in (1, batch):
        raise LaunchError(f"{said} is {list(given.shape)} beside {name} {list(x.shape)}: it is {wanted}")
    if joined is not None and whole.shape[1] < rows:
        raise LaunchError(
            f"{said} has {whole.shape[1]} rows and a sequence of {name} up to {rows}: one for each of its positions\n"
            f"  nearest: {said} of {rows} positions or more, or max_seqlen_{name}={whole.shape[1]}"
        )
    if joined is None and whole.shape[1] != rows and rows:
        cure = f"{said}[positions], a row for each of {name}"
        if whole.shape[1] > rows:
            cure = f"{said} of the positions of {name} alone, and ({said} of q, {said} of k) where these differ"
        raise LaunchError(f"{said} has {whole.shape[1]} rows and {name} {rows}: one for each\n  nearest: {cure}")
    if whole.shape[2] not in (head_dim // 2, head_dim):
        raise LaunchError(
            f"{said} has {whole.shape[2]} columns and {name} head_dim {head_dim}: an angle for each pair of columns, or"
            f" for each column; all turn\n  nearest: {wanted}, or {name} turned before where some columns do not"
        )
    if whole.stride(2) != 1:
        raise LaunchError(f"{said}'s last dimension has stride {whole.stride(2)}\n  nearest: {said}.contiguous()")
    strides = (s for s, n in zip(whole.stride()[:2], whole.shape, strict=False) if n > 1)
    if whole.is_cuda and (whole.data_ptr() % 16 or any(s * whole.itemsize % 16 for s in strides)):
        raise LaunchError(f"rows of {said} do not start at multiples of 16 bytes\n  nearest: {said}.contiguous()")
    return whole
