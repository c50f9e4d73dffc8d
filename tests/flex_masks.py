"""mask_mods as people give them to PyTorch's flex_attention: factories by name, as a training loop would have them."""

import functools
import sys
from collections import namedtuple
from types import SimpleNamespace

import torch
from flex_inputs import BATCH, HEADS, LENGTH, documents, integers
from torch import nn
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

MASKS = {}

WINDOW = 37  # a global that a mask reads
OFFSETS = torch.tensor([0, 31, 70, 71, 150])
LEVELS = [torch.arange(LENGTH) // 8, torch.arange(LENGTH) // 32]


def mask(factory):
    MASKS[factory.__name__] = factory
    return factory


# ---------------------------------------------------------------------------------------------------------------------
# Masks of positions alone


@mask
def causal():
    return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


@mask
def anti_causal():
    return lambda b, h, q_idx, kv_idx: torch.lt(q_idx, kv_idx)


@mask
def sliding_window():
    def window(b, h, q_idx, kv_idx):
        near = q_idx - kv_idx <= WINDOW
        return (q_idx >= kv_idx) & near

    return window


@mask
def symmetric_window():
    def window(b, h, q, k):
        return (q - k).abs() < 20

    return window


@mask
def two_sided_window():
    def window(b, h, q, k, *, left=9, right=4):
        return torch.logical_and(k >= q - left, k <= q + right)

    return window


@mask
def composed_prefix():
    def prefix(b, h, q, k):
        return k < 40

    def lower(b, h, q, k):
        return q >= k

    return or_masks(prefix, lower)


@mask
def composed_window():
    near = functools.partial(lambda reach, b, h, q, k: abs(q - k) < reach, 25)
    return and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: near(b, h, q, k))


@mask
def no_mask():
    return noop_mask


@mask
def nothing_composed():
    return and_masks()


@mask
def attention_sink():
    def sink(b, h, q, k):
        seen = k <= q
        keep = torch.where(k < 4, torch.tensor(True), q - k < 30)
        return seen & keep

    return sink


@mask
def dilated():
    def stride(b, h, q, k):
        return (q >= k) & ((q - k) % 3 == 0)

    return stride


@mask
def strided_floor():
    def stride(b, h, q, k):
        return torch.floor_divide(q, 16) >= torch.div(k, 16, rounding_mode="floor")

    return stride


@mask
def truncated_division():
    def centred(b, h, q, k):
        return torch.div(q - 75, 16, rounding_mode="trunc") == torch.div(75 - k, -16, rounding_mode="trunc")

    return centred


@mask
def remainders():
    def same(b, h, q, k):
        return (torch.remainder(q - k, 7) < 3) | (torch.fmod(k - q, 5) == -1)

    return same


@mask
def butterfly():
    def bits(b, h, q, k):
        x = q ^ k
        return (x & (x - 1)) == 0

    return bits


@mask
def shifted_levels():
    def levels(b, h, q, k):
        return (torch.bitwise_right_shift(q, 4) == k >> 4) | ((q << 1) == k) | (~q == -k)

    return levels


@mask
def morton_neighbours():
    def spread(x):
        x = x & 0xFF
        x = (x | (x << 4)) & 0x0F0F
        x = (x | (x << 2)) & 0x3333
        return (x | (x << 1)) & 0x5555

    return lambda b, h, q, k: (spread(q) >> 5) == (spread(k) >> 5)


@mask
def canvas_neighbourhood():
    width, height, reach = 15, 10, 2

    def place(i):
        return i // width, i % width

    def near(b, h, q, k):
        (qy, qx), (ky, kx) = place(q), place(k)
        y = qy.clamp(reach, height - 1 - reach)
        x = torch.clamp(qx, min=reach, max=width - 1 - reach)
        return ((y - ky).abs() <= reach) & ((x - kx).abs() <= reach)

    return near


@mask
def tiled_canvas():
    def corner(i):
        tile, inside = i // 25, i % 25
        return (tile % 3) * 5 + inside % 5, (tile // 3) * 5 + inside // 5

    def near(b, h, q, k):
        x, y = corner(q)
        u, v = corner(k)
        return torch.maximum(torch.abs(x - u), torch.abs(y - v)) <= 3

    return near


@mask
def by_head():
    def heads(b, h, q, k):
        reach = torch.where(h % 2 == 0, 16, 64)
        return (q >= k) & (q - k < reach)

    return heads


@mask
def by_head_power():
    return lambda b, h, q, k: (q - k).clamp_min(0) < 2 ** (h + 4).float()


@mask
def by_batch():
    return lambda b, h, q, k: torch.where(b == 0, q >= k, q <= k)


@mask
def counted_conditions():
    def counted(b, h, q, k):
        votes = (q >= k) * 1 + (k % 2 == 0) + (q - k < 50).int() * 2
        return votes >= 3

    return counted


@mask
def conditions_as_numbers():
    def mixed(b, h, q, k):
        both = (q >= k) * (k > 3)
        either = (q == k) + (k < 2)
        return both + either

    return mixed


@mask
def named_functions():
    def spelled(b, h, q, k):
        a = torch.ge(q, k).logical_and(torch.le(q - k, 60))
        return (
            a.logical_or(torch.eq(k, 0))
            .bitwise_and(torch.ne(k, 7))
            .logical_xor(torch.gt(k, 1000))
            .logical_not()
            .logical_not()
        )

    return spelled


@mask
def made_tensors():
    def made(b, h, q, k):
        true = torch.ones_like(q, dtype=torch.bool)
        none = q.new_zeros((), dtype=torch.bool)
        limit = torch.full_like(q, 30)
        return (true & (q >= k) | none) & (q - k < limit + torch.zeros_like(k))

    return made


@mask
def isin_of_list():
    chosen = [0, 5, 17, 101]

    def some(b, h, q, k):
        return torch.isin(k, torch.tensor(chosen)) | (q == k)

    return some


@mask
def float_distance():
    def disc(b, h, q, k):
        x, y = (q % 12).float(), torch.floor(q / 12)
        u, v = (k % 12).to(torch.float32), (k / 12).floor()
        return torch.sqrt((x - u) ** 2 + (y - v).square()) <= 4.5

    return disc


@mask
def default_arguments():
    three = torch.tensor(3)

    def mod(b, h, q, k, window=22, step=three):
        return (q - k < window) & (q % step >= k % step)

    return mod


@mask
def squeezed():
    def mod(b, h, q, k):
        return (q.view(1) >= k.unsqueeze(0)).squeeze() & (q.expand(2) - k < 40).all()

    return mod


# ---------------------------------------------------------------------------------------------------------------------
# Masks of captured tensors


@mask
def document():
    ids = documents(LENGTH)

    def same(b, h, q, k):
        return ids[q] == ids[k]

    return same


@mask
def document_per_batch():
    ids = documents(BATCH, LENGTH, seed=1).int()
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k)


@mask
def document_by_steps():
    ids = documents(BATCH, LENGTH, seed=2).to(torch.int16)

    def same(b, h, q, k):
        row = ids[b]
        return row[q] == row[k]

    return same


@mask
def document_with_local_positions():
    lengths = torch.tensor([31, 39, 1, 79])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.repeat_interleave(torch.arange(4), lengths)

    def inner(b, h, q, k):
        return q - k <= 12

    def mod(b, h, q, k):
        local_q, local_k = q - offsets[ids[q]], k - offsets[ids[k]]
        return torch.where(ids[q] == ids[k], inner(b, h, local_q, local_k) & (local_q >= local_k), False)

    return mod


@mask
def offsets_searched():
    def mod(b, h, q, k):
        return torch.searchsorted(OFFSETS, q, right=True) == torch.bucketize(k, OFFSETS, right=True)

    return mod


@mask
def padding():
    lengths = torch.tensor([150, 90])

    def padded(b, h, q, k):
        return (k < lengths[b]) & (q < lengths[b])

    return padded


@mask
def padding_left():
    start = torch.tensor([0, 60], dtype=torch.int32)
    return lambda b, h, q, k: (k >= start[b].long()) & (q >= k)


@mask
def padding_flags():
    keep = integers(4, BATCH, LENGTH, seed=3) > 0
    return lambda b, h, q, k: keep[b, k] & (q >= k)


@mask
def padding_bytes():
    keep = (integers(4, BATCH, LENGTH, seed=4) > 0).to(torch.uint8)
    return lambda b, h, q, k: keep[b, k].bool() & (keep[b][q] == 1)


@mask
def whole_mask():
    shown = integers(3, BATCH, 1, LENGTH, LENGTH, seed=5).bool()
    return lambda b, h, q, k: shown[b, 0, q, k]


@mask
def offset_tensor():
    offset = torch.tensor(11)

    def later(b, h, q, k):
        return q + offset >= k

    return later


@mask
def prefix_lengths():
    prefix = torch.tensor([20, 77])
    return or_masks(lambda b, h, q, k: k < prefix[b], lambda b, h, q, k: q >= k)


@mask
def blocks_of_table():
    table = integers(2, BATCH, HEADS, 10, 10, seed=6).bool()

    def mod(b, h, q, k):
        return table[b, h, q // 16, k // 16]

    return mod


@mask
def pages():
    pages = SimpleNamespace(size=16, logical=torch.tensor([[3, -1, 0, 2, 1, 5, 4, -1, 7, 6]]))

    def mod(b, h, q, physical):
        block = pages.logical[0, physical // pages.size]
        k = block * pages.size + physical % pages.size
        return torch.where(block >= 0, q >= k, False)

    return mod


@mask
def intervals():
    spans = torch.tensor([[0, 40], [30, 100], [100, 150]])
    image = torch.arange(LENGTH) // 50

    def mod(b, h, q, k):
        span = spans[image[k]]
        return (q >= span[0]) & (q < span[1])

    return mod


@mask
def spans_of_rows():
    begin, end = integers(150, BATCH, 5, seed=7), integers(150, BATCH, 5, seed=8)

    def mod(b, h, q, k):
        inside = (begin[b] <= q) & (k <= end[b])
        return inside.any(-1) | (q == k)

    return mod


@mask
def row_of_positions():
    chosen = integers(150, BATCH, 12, seed=9)
    return lambda b, h, q, k: (chosen[b] == k.unsqueeze(-1)).any(-1) & (q >= k)


@mask
def all_of_row():
    limits = torch.tensor([[10, 20], [30, 5]])
    return lambda b, h, q, k: torch.all(torch.abs(q - k) != limits[b], dim=0)


@mask
def counted_rows():
    marks = integers(150, 20, seed=10)
    return lambda b, h, q, k: ((marks > k) & (marks <= q)).sum() < 3


@mask
def negative_indices():
    flags = integers(2, LENGTH, seed=11).bool()
    return lambda b, h, q, k: flags[-1 - k] | flags[q - LENGTH]


@mask
def wrapped_indices():
    table = integers(2, 40, seed=12).bool()
    return lambda b, h, q, k: table[(q - k).clamp(-40, 39)]


@mask
def levels_of_list():
    def mod(b, h, q, k):
        return (LEVELS[0][q] == LEVELS[0][k]) | (LEVELS[1][k] < LEVELS[-1][q])

    return mod


@mask
def rows_unrolled():
    marks = torch.tensor([3, 60, 120])

    def mod(b, h, q, k):
        found = k == q
        for i in range(marks.shape[0]):
            found = found | ((k - marks[i]).abs() < 4)
        return found

    return mod


@mask
def sized_table():
    table = integers(3, 33, seed=13)

    def mod(b, h, q, k):
        return table[(q // 3).clamp(max=table.size(0) - 1)] >= table[torch.clamp(k, 0, len(table) - 1)]

    return mod


@mask
def views():
    both = integers(5, 2, LENGTH, seed=14)
    of_q, of_k = both[0], both[1]
    return lambda b, h, q, k: of_q[q] <= of_k[k]


@mask
def lookups_of_rows():
    table, group = integers(2, 6, 4, seed=15).bool(), integers(6, LENGTH, seed=16)
    return lambda b, h, q, k: table[group[q]][k % 4] & table.T[q % 4, group[k]]


@mask
def callable_object():
    class Document:
        def __init__(self, ids):
            self.ids, self.window = ids, 50

        def near(self, q, k):
            return q - k < self.window

        def __call__(self, b, h, q, k):
            return (self.ids[q] == self.ids[k]) & self.near(q, k)

    return Document(documents(LENGTH, seed=17))


@mask
def bound_method():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("lengths", torch.tensor([120, 60]))
            self.reach = 70

        def mod(self, b, h, q, k):
            return (k < self.lengths[b]) & (q >= k) & (q - k < self.reach)

    model = Model()
    return lambda b, h, q, k: model.mod(b, h, q, k)


@mask
def partial_of_tensors():
    def mod(ids, reach, b, h, q, k):
        return (ids[q] == ids[k]) | (abs(q - k) < reach)

    return functools.partial(mod, documents(LENGTH, seed=18), 3)


@mask
def named_tuple():
    packed = namedtuple("packed", "ids flags")(
        documents(LENGTH, seed=19), {"keep": integers(2, LENGTH, seed=20).bool()}
    )
    return lambda b, h, q, k: (packed.ids[q] == packed.ids[k]) & packed.flags["keep"][k]


@mask
def maximum_of_tensors():
    left, right = integers(LENGTH, LENGTH, seed=21), integers(LENGTH, LENGTH, seed=22)
    return lambda b, h, q, k: (torch.minimum(left[q], right[q]) <= k) & (k <= torch.max(left[q], right[q]))


@mask
def divided_by_tensor():
    sizes = torch.tensor([7, 16])
    return lambda b, h, q, k: (q // sizes[h] == k // sizes[h]) | (q % -sizes[h] == -3)


@mask
def selected():
    table = integers(2, HEADS, LENGTH, seed=23).bool()
    return lambda b, h, q, k: table.select(0, 1)[k] | torch.index_select(table, 1, q.unsqueeze(0)).squeeze(-1)[h]


@mask
def type_like():
    ids = documents(LENGTH, seed=24).int()
    return lambda b, h, q, k: q.type_as(ids) - k.to(ids.dtype) < ids[q].to(ids).clamp(5, 60)


@mask
def unlimited():
    """Numbers that 32 bits do not hold, which stand for no limit: positions are int64 in torch."""
    no_window = sys.maxsize

    def window(b, h, q, k):
        return (q >= k) & (q - k < no_window) & (k - q <= 2**31) & (q != 2**32) & (k > -(2**33))

    return window


@mask
def shifted_out():
    bits, wide = torch.tensor(5), torch.tensor([-3, 1 << 40])
    return lambda b, h, q, k: (
        ((bits >> (k - 4)) & 1 != 0) | ((wide[h] << (k - 9)) != 0) & (q % 3 == 0) | (wide[h] >> (q - 2) < 0)
    )
