"""Runs the variant's code of emitted CUDA on the PTX interpreter: a kernel of its own around the shared templates."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from flashgen import interpreter
from flashgen.analysis.facts import Facts
from flashgen.analysis.tiles import Case
from flashgen.codegen import device, params
from flashgen.codegen.emit import environment
from flashgen.codegen.split_keys import KeyCode
from flashgen.codegen.variant_code import variant_code
from flashgen.interpreter.simulate import stored
from flashgen.planning.members import ALL_KEYS
from flashgen.planning.plan import Tile
from flashgen.planning.problem import Problem
from flashgen.planning.summaries import ENTRY, THREADS, count, tile_summaries
from flashgen.runtime import nvrtc

TEMPLATE = """{{ device }}

typedef u16 bf16;
constexpr int TILE_Q = {{ tile.q }}, TILE_KV = {{ tile.kv }};
struct Params {
//% for field in fields
  {{ field.ctype }} {{ field.name }};
//% endfor
};
struct Rows { int b, h, q_first, q_last; };
{% include "variant.cu.j2" %}

{% include "schedule.cu.j2" %}

// A block of one warp for each (b, h, tile of queries): the tiles it visits, then what `keep` and `score` give.
extern "C" __global__ void probe(const __grid_constant__ Params p, int* visited, unsigned char* kept, float* scores) {
  const int lane = threadIdx.x, q_tile = blockIdx.x % p.q_tiles, head = blockIdx.x / p.q_tiles;
  const int q_first = q_tile * TILE_Q;
  const Rows rows = {head / p.heads, head % p.heads, q_first, min(q_first + TILE_Q, p.q_len) - 1};
  const int kv_tiles = (p.kv_len + TILE_KV - 1) / TILE_KV;
  Step step = {kv_tiles};
  while ((step = next_step(step.tile{{ ", rows, p" if code.keep }})).tile >= 0)
    if (lane == 0) visited[blockIdx.x * kv_tiles + step.tile] = {{ "step.partial ? 1 : 2" if code.keep else "2" }};
  for (int q = rows.q_first; q <= rows.q_last; q++)
    for (int k = lane; k < p.kv_len; k += 32) {
      const i64 at = ((i64)head * p.q_len + q) * p.kv_len + k;
//% if code.keep
      kept[at] = keep(rows.b, rows.h, q, k, p);
//% endif
//% if code.score
      scores[at] = score(scores[at], rows.b, rows.h, q, k, p);
//% endif
    }
}
"""


def emitted(facts: Facts, tile: Tile) -> str:
    """The code of a variant with a kernel that records what it decides."""
    members = members_of(facts, tile)
    code = variant_code(facts, tile, summaries=tile_summaries(facts, tile))
    context = {"code": code, "tile": tile, "fields": members, "keys": KeyCode(ALL_KEYS, tile.kv), "enter": ""}
    template = environment().from_string(TEMPLATE)
    return template.render(context, device=device.used_by(template.render(context, device="")))


def members_of(facts: Facts, tile: Tile) -> tuple[params.Field, ...]:
    """The members of the kernel's `Params`."""
    return params.fields_of(facts.variant, "bfloat16", summaries=tile_summaries(facts, tile))


@lru_cache(maxsize=4)
def compiled(source: str) -> interpreter.Module:
    return interpreter.load(nvrtc.ptx(source, "sm_80"), target="sm_80")


def prepared(facts: Facts, case: Case, tile: Tile) -> tuple[interpreter.Memory, dict, dict[str, np.ndarray]]:
    """Memory that holds what is captured, the values of `Params`, and the bytes of summaries, which are made."""
    memory, members = interpreter.Memory(), members_of(facts, tile)
    values = dict.fromkeys((field.name for field in members), 0) | case.sizes
    values |= {"q_tiles": -(-case.sizes["q_len"] // tile.q)}
    values |= {f"param_{name}": value for name, value in case.params.items()}
    for tensor in facts.variant.tensors:
        array = stored(case.tensors[tensor.name], tensor.dtype)
        values[f"tensor_{tensor.name}"] = memory.add(tensor.name, array)
        for axis, (size, step) in enumerate(zip(array.shape, array.strides, strict=True)):
            values[f"size{axis}_{tensor.name}"] = size
            values[f"stride{axis}_{tensor.name}"] = step // array.itemsize if size > 1 else 0
    rooms, problem = {}, Problem(**case.sizes, head_dim=64, v_head_dim=64)
    for one in tile_summaries(facts, tile):
        rooms[one.name] = np.full(count(one, problem) * one.itemsize, 0xFF, np.uint8)
        values[one.pointer] = memory.add(one.pointer, rooms[one.name], writable=True)
    if rooms:
        compiled(emitted(facts, tile)).launch(ENTRY, 2, THREADS, 0, [params.packed(members, values)], memory)
    return memory, values, rooms


def run(facts: Facts, case: Case, tile: Tile, scores: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Classes of visited tiles [b, h, q tile, kv tile] (0: not visited), `keep` and `score` [b, h, q, k]."""
    sizes = case.sizes
    batch, heads, q_len, kv_len = (sizes[n] for n in ("batch", "heads", "q_len", "kv_len"))
    q_tiles, kv_tiles = -(-q_len // tile.q), -(-kv_len // tile.kv)
    memory, values, _ = prepared(facts, case, tile)
    visited = np.zeros((batch, heads, q_tiles, kv_tiles), np.int32)
    kept = np.ones((batch, heads, q_len, kv_len), np.uint8)
    scores = np.zeros(kept.shape, np.float32) if scores is None else scores.astype(np.float32)
    out = [memory.add(n, a, writable=True) for n, a in (("visited", visited), ("kept", kept), ("scores", scores))]
    packed = params.packed(members_of(facts, tile), values)
    module = compiled(emitted(facts, tile))
    arguments = [packed, *(int(address).to_bytes(8, "little") for address in out)]
    module.launch("probe", q_tiles * heads * batch, 32, 0, arguments, memory)
    return visited, kept.astype(bool), scores
