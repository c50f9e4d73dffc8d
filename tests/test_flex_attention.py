"""flex_attention: the call of PyTorch's FlexAttention, with block masks as its compiled form reads them."""

import gc
import inspect
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, noop_mask

import flashgen
from flashgen.frontends import flex
from flashgen.integrations import flex_attention as ours

BATCH, HEADS, LENGTH, DIM, BLOCK = 2, 2, 150, 8, 32


def inputs(batch=BATCH, heads=HEADS, length=LENGTH, kv_heads=None, kv_batch=None, kv_length=None, **options):
    generator = torch.Generator().manual_seed(0)
    of_q = (batch, heads, length, DIM)
    of_k = (kv_batch or batch, kv_heads or heads, kv_length or length, DIM)
    options = {"generator": generator, "dtype": torch.float64} | options
    return [torch.randn(shape, **options) for shape in (of_q, of_k, of_k)]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def by_batch_and_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 40 * (b + 1)) & (q_idx >= kv_idx - h)


def documents(ids):
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def rule(block_mask, q_len=LENGTH, kv_len=LENGTH):
    """A pair is visible where its block is listed, and is a full block or mask_mod holds: block by block."""
    rows, columns = block_mask.BLOCK_SIZE
    keep = torch.zeros(BATCH, HEADS, q_len, kv_len, dtype=torch.bool)
    by_mod = create_mask(block_mask.mask_mod, BATCH, HEADS, q_len, kv_len, device="cpu")
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, False)]
    if block_mask.full_kv_num_blocks is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True))
    for counts, indices, full in lists:
        counts, indices = (x.expand(BATCH, HEADS, *x.shape[2:]) for x in (counts, indices))
        for b in range(BATCH):
            for h in range(HEADS):
                for row in range(counts.shape[2]):
                    for column in indices[b, h, row, : counts[b, h, row]].tolist():
                        block = (
                            b,
                            h,
                            slice(row * rows, (row + 1) * rows),
                            slice(column * columns, (column + 1) * columns),
                        )
                        keep[block] = True if full else by_mod[block]
    return keep


def masked(q, k, v, keep, scale=DIM**-0.5):
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~keep, -torch.inf)
    return torch.where(keep.any(-1, keepdim=True), torch.softmax(scores, -1), 0) @ v


def follows(block_mask):
    return ours._found[block_mask].follows


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 0), (0, 300), (300, 0)])
@pytest.mark.parametrize("mod", [causal, noop_mask])
def test_block_masks_of_no_queries_or_keys(mod, q_len, kv_len):
    q, k = torch.randn(BATCH, HEADS, q_len, DIM), torch.randn(BATCH, HEADS, kv_len, DIM)
    block_mask = create_block_mask(mod, None, None, q_len, kv_len, device="cpu")
    found = flashgen.flex_attention(q, k, k, block_mask=block_mask)
    assert torch.equal(found, torch.zeros(BATCH, HEADS, q_len, DIM))


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("mod", [causal, by_batch_and_head])
def test_blocks_that_follow_from_mask_mod_are_left_out(mod, separate):
    options = {} if separate else {"separate_full_blocks": False}
    if not options.keys() <= inspect.signature(create_block_mask).parameters.keys():
        pytest.skip("this PyTorch always separates full blocks")
    block_mask = create_block_mask(mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK, **options)
    q, k, v = inputs()
    torch.testing.assert_close(
        flashgen.flex_attention(q, k, v, block_mask=block_mask), masked(q, k, v, rule(block_mask))
    )
    assert follows(block_mask)


@pytest.mark.parametrize("pairs", [1, 2 * BLOCK * LENGTH * 3])
def test_mask_mod_is_asked_about_a_part_of_the_rows_at_a_time(pairs, monkeypatch):
    monkeypatch.setattr(ours, "_PAIRS_AT_A_TIME", pairs)
    block_mask = create_block_mask(causal, BATCH, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    flashgen.flex_attention(*inputs(), block_mask=block_mask)
    assert follows(block_mask)
    block_mask.mask_mod = by_batch_and_head
    flashgen.flex_attention(*inputs(), block_mask=block_mask)
    assert not follows(block_mask)


def test_blocks_follow_whatever_their_sides():
    q, k, v = inputs(length=70, kv_length=190)

    def mod(b, h, q_idx, kv_idx):
        return q_idx * 2 + 40 >= kv_idx

    block_mask = create_block_mask(mod, 1, 1, 70, 190, device="cpu", BLOCK_SIZE=(16, 64))
    found = flashgen.flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(found, masked(q, k, v, rule(block_mask, 70, 190)))
    assert follows(block_mask)


def lists(*, full=False, seed=0, batch=BATCH, heads=HEADS):
    """Lists of random blocks, in no order."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-LENGTH // BLOCK)
    indices = torch.rand(batch, heads, blocks, blocks, generator=generator).argsort(-1).int()
    counts = torch.randint(0, blocks // 2 + 1, (batch, heads, blocks), generator=generator).int()
    if not full:
        return (counts, indices)
    behind = torch.randint(0, 2, (batch, heads, blocks), generator=generator).int()
    rolled = indices.flip(-1).contiguous()  # at the other end, so that no block is in both
    return (counts, indices, behind, rolled)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"batch": 1}, {"batch": 1, "heads": 1}], ids=str)
@pytest.mark.parametrize("mod", [causal, None], ids=["causal", "noop"])
def test_blocks_that_say_more_are_a_layout(mod, sizes, full):
    block_mask = BlockMask.from_kv_blocks(
        *lists(full=full, **sizes), BLOCK_SIZE=BLOCK, mask_mod=mod, seq_lengths=(LENGTH, LENGTH)
    )
    q, k, v = inputs()
    torch.testing.assert_close(
        flashgen.flex_attention(q, k, v, block_mask=block_mask), masked(q, k, v, rule(block_mask))
    )
    assert not follows(block_mask)


def test_full_blocks_are_full_whatever_mask_mod_says():
    blocks = -(-LENGTH // BLOCK)
    all_of = torch.full((1, 1, blocks), blocks).int(), torch.arange(blocks).int().expand(1, 1, blocks, -1)
    none = torch.zeros(1, 1, blocks).int(), torch.zeros(1, 1, blocks, blocks).int()
    block_mask = BlockMask.from_kv_blocks(
        *none, *all_of, BLOCK_SIZE=BLOCK, mask_mod=causal, seq_lengths=(LENGTH, LENGTH)
    )
    q, k, v = inputs()
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    torch.testing.assert_close(flashgen.flex_attention(q, k, v, block_mask=block_mask), masked(q, k, v, everything))


def test_new_layouts_of_one_kind_are_not_traced_again():
    q, k, v = inputs()
    masks = [
        BlockMask.from_kv_blocks(*lists(seed=seed), BLOCK_SIZE=BLOCK, mask_mod=causal, seq_lengths=(LENGTH, LENGTH))
        for seed in range(3)
    ]
    flashgen.flex_attention(q, k, v, block_mask=masks[0])
    before = flex.traces
    for block_mask in masks[1:]:
        found = flashgen.flex_attention(q, k, v, block_mask=block_mask)
        torch.testing.assert_close(found, masked(q, k, v, rule(block_mask)))
    assert flex.traces == before


def test_a_block_mask_is_asked_about_once(monkeypatch):
    asked = []
    asks = ours._follows
    monkeypatch.setattr(ours, "_follows", lambda *given: asked.append(1) or asks(*given))
    block_mask = create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    for _ in range(3):
        flashgen.flex_attention(*inputs(), block_mask=block_mask)
    assert len(asked) == 1


def test_blocks_are_left_out_while_mask_mod_reads_what_they_were_made_of(monkeypatch):
    """A mask_mod that reads tensors is asked once for each of their contents; blocks that it disagrees with stay."""
    asked = []
    asks = ours._follows
    monkeypatch.setattr(ours, "_follows", lambda *given: asked.append(1) or asks(*given))
    old, new = torch.arange(LENGTH) // 37, torch.arange(LENGTH) // 80
    ids = old.clone()
    block_mask = create_block_mask(documents(ids), 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    q, k, v = inputs()
    for contents, following in ((old, True), (new, False), (old, True)):
        ids.copy_(contents)
        for _ in range(2):
            found = flashgen.flex_attention(q, k, v, block_mask=block_mask)
            torch.testing.assert_close(found, masked(q, k, v, rule(block_mask)))
        assert follows(block_mask) is following
    assert len(asked) == 3
    block_mask.mask_mod = documents(new)
    torch.testing.assert_close(
        flashgen.flex_attention(q, k, v, block_mask=block_mask), masked(q, k, v, rule(block_mask))
    )
    assert not follows(block_mask)


def test_mask_mod_is_asked_about_the_heads_and_batches_that_it_reads():
    """Blocks of one batch and head, made of the first: another head of mask_mod says more."""
    q, k, v = inputs()
    slopes = torch.tensor([150, 20])

    def mod(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= slopes[h]

    for given, following in ((slopes, False), (torch.tensor([20, 150]), False), (torch.tensor([150, 150]), True)):
        slopes.copy_(given)
        block_mask = create_block_mask(mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
        torch.testing.assert_close(
            flashgen.flex_attention(q, k, v, block_mask=block_mask), masked(q, k, v, rule(block_mask))
        )
        assert follows(block_mask) is following


def test_new_contents_of_blocks_are_read():
    block_mask = create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    q, k, v = inputs()
    for count, following in ((None, True), (0, False), (1, False)):
        if count is not None:
            block_mask.kv_num_blocks.fill_(count)
        found = flashgen.flex_attention(q, k, v, block_mask=block_mask)
        torch.testing.assert_close(found, masked(q, k, v, rule(block_mask)))
        assert follows(block_mask) is following
    block_mask.full_kv_num_blocks = block_mask.full_kv_indices = None
    found = flashgen.flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(found, masked(q, k, v, rule(block_mask)))


@pytest.mark.slow
def test_a_block_mask_is_held_weakly():
    ids = torch.arange(LENGTH) // 37
    block_mask = create_block_mask(documents(ids), 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    flashgen.flex_attention(*inputs(), block_mask=block_mask)
    dead = weakref.ref(block_mask), weakref.ref(ids)
    del block_mask, ids
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


def test_score_and_mask_together_with_gradients():
    slopes = torch.tensor([0.1, 0.3], requires_grad=True)

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx)

    block_mask = create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    q, k, v = (x.requires_grad_() for x in inputs())
    found = flashgen.flex_attention(q, k, v, alibi, block_mask, scale=0.2)
    at = torch.arange(LENGTH)
    scores = q @ k.transpose(-1, -2) * 0.2 - slopes[:, None, None].double() * (at[:, None] - at)
    wanted = torch.softmax(scores.masked_fill(at[:, None] < at, -torch.inf), -1) @ v
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    gradient = torch.randn_like(found)
    for mine, theirs in zip(
        *(torch.autograd.grad(o, (q, k, v, slopes), gradient) for o in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_without_mods_it_is_full_attention():
    q, k, v = inputs()
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    for given in ({}, {"block_mask": None}, {"block_mask": torchs._create_empty_block_mask(q, k)}):
        torch.testing.assert_close(flashgen.flex_attention(q, k, v, **given), masked(q, k, v, everything))
    all_blocks = create_block_mask(noop_mask, 1, 1, LENGTH, LENGTH, device="cpu")
    torch.testing.assert_close(flashgen.flex_attention(q, k, v, block_mask=all_blocks), masked(q, k, v, everything))
    assert follows(all_blocks)


def test_heads_are_grouped_where_that_is_enabled():
    q, k, v = inputs(heads=4, kv_heads=2)
    found = flashgen.flex_attention(q, k, v, enable_gqa=True)
    repeated = [x.repeat_interleave(2, 1) for x in (k, v)]
    torch.testing.assert_close(found, flashgen.flex_attention(q, *repeated))
    with pytest.raises(flashgen.LaunchError, match=r"4 heads and key 2[^\n]*\n  nearest: enable_gqa=True"):
        flashgen.flex_attention(q, k, v)
    q, k, v = inputs(heads=4, kv_heads=3)
    with pytest.raises(flashgen.LaunchError, match="no multiple of the 3"):
        flashgen.flex_attention(q, k, v, enable_gqa=True)


def test_keys_of_one_batch_serve_all():
    q, k, v = inputs(kv_batch=1)
    block_mask = create_block_mask(by_batch_and_head, BATCH, HEADS, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    found = flashgen.flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(found, masked(q, k, v, rule(block_mask)))
    with pytest.raises(flashgen.FlashgenError, match="batch"):
        flashgen.flex_attention(q, k, v)


def test_results_are_those_that_were_asked_for():
    q, k, v = inputs()
    wanted = torch.logsumexp(q @ k.transpose(-1, -2) * DIM**-0.5, -1)
    o, lse = flashgen.flex_attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, wanted)
    if not hasattr(torchs, "AuxRequest"):
        return
    again, aux = flashgen.flex_attention(q, k, v, return_aux=torchs.AuxRequest(lse=True))
    torch.testing.assert_close((again, aux.lse), (o, lse))
    assert aux.max_scores is None and isinstance(aux, torchs.AuxOutput)
    assert flashgen.flex_attention(q, k, v, return_aux=torchs.AuxRequest())[1] == torchs.AuxOutput()
    with pytest.raises(flashgen.LaunchError, match=r"max_scores[^\n]*\n  nearest: return_aux=AuxRequest\(lse=True\)"):
        flashgen.flex_attention(q, k, v, return_aux=torchs.AuxRequest(max_scores=True))
    with pytest.raises(flashgen.LaunchError, match="return_lse and return_aux are both given"):
        flashgen.flex_attention(q, k, v, return_lse=True, return_aux=torchs.AuxRequest(lse=True))


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"BLOCK_M": 64}, "'BLOCK_M'.*planner chooses tiles"),
        ({"fwd_num_stages": 2}, "'fwd_num_stages'.*planner chooses tiles"),
        ({"bwd_BLOCK_N1": 32}, "'bwd_BLOCK_N1'.*planner"),
        ({"BACKEND": "FLASH"}, "'BACKEND'.*flashgen is the backend"),
        ({"USE_TMA": True}, "'USE_TMA'.*leave it out"),
        ({"block_m": 64}, "'block_m'.*leave it out"),
        ({1: 2}, "kernel_options has the key 1, a int: keys are names.*nearest: leave it out"),
    ],
    ids=str,
)
def test_options_of_other_kernels_are_refused_by_name(options, cure):
    with pytest.raises(flashgen.LaunchError, match="(?s)" + cure):
        flashgen.flex_attention(*inputs(), kernel_options=options)


def test_promises_change_nothing():
    q, k, v = inputs()
    promised = {"PRESCALE_QK": True, "ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}
    assert torch.equal(flashgen.flex_attention(q, k, v, kernel_options=promised), flashgen.flex_attention(q, k, v))


def test_block_masks_of_other_problems_are_refused():
    q, k, v = inputs()
    of_more = create_block_mask(causal, 1, 1, LENGTH + 10, LENGTH, device="cpu")
    with pytest.raises(flashgen.LaunchError, match=rf"q_len {LENGTH + 10}.*\n  nearest: create_block_mask"):
        flashgen.flex_attention(q, k, v, block_mask=of_more)
    of_fewer = create_block_mask(causal, 1, 1, LENGTH, LENGTH - 1, device="cpu")
    with pytest.raises(flashgen.LaunchError, match=f"kv_len {LENGTH - 1}"):
        flashgen.flex_attention(q, k, v, block_mask=of_fewer)
    of_three = create_block_mask(causal, 3, 1, LENGTH, LENGTH, device="cpu")
    with pytest.raises(flashgen.LaunchError, match="block_mask has batch 3, and query 2"):
        flashgen.flex_attention(q, k, v, block_mask=of_three)
    elsewhere = create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu").to("meta")
    with pytest.raises(flashgen.LaunchError, match="query is on cpu and block_mask on meta"):
        flashgen.flex_attention(q, k, v, block_mask=elsewhere)


@pytest.mark.parametrize("with_blocks", [False, True])
def test_other_devices_are_refused_before_blocks_are_read(with_blocks):
    block_mask = create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu").to("meta")
    q, k, v = (x.to("meta") for x in inputs())
    with pytest.raises(flashgen.LaunchError, match=r"^query is on meta: attention runs on NVIDIA GPUs"):
        flashgen.flex_attention(q, k, v, block_mask=block_mask if with_blocks else None)


def test_block_masks_without_content_are_read_by_the_kernel():
    """Those of FakeTensors; one that was made before says what it says, under any mode, and once."""
    made = create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = inputs()
        assert flashgen.flex_attention(q, k, v, block_mask=made).shape == q.shape and follows(made)
        fake = create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
        assert flashgen.flex_attention(q, k, v, block_mask=fake).shape == q.shape
    made, (q, k, v) = create_block_mask(by_batch_and_head, BATCH, HEADS, LENGTH, LENGTH, device="cpu"), inputs()
    graph = make_fx(lambda q: flashgen.flex_attention(q, k, v, block_mask=made))(q)
    assert follows(made) and torch.equal(graph(q), flashgen.flex_attention(q, k, v, block_mask=made))


def test_sliced_block_masks_are_refused():
    block_mask = create_block_mask(causal, BATCH, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    forgets = hasattr(torchs, "_sliced_mask_mod_error")  # its mask_mod
    cure = r"and then pass block_mask._adjust\(q_len, kv_len\)" if forgets else "nearest: a block mask of its own"
    with pytest.raises(flashgen.LaunchError, match=f"sliced(?s:.*){cure}"):
        flashgen.flex_attention(*inputs(), block_mask=block_mask[:, :, 1:3])
    rows = block_mask[:, :, 1:3]
    rows.mask_mod = lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + BLOCK, kv_idx)
    with pytest.raises(flashgen.LaunchError, match="has 2 rows of blocks, and q_len 150 has 5: it was sliced"):
        flashgen.flex_attention(*inputs(), block_mask=rows)
    if not forgets:
        return  # an older PyTorch, which counts the lengths of a part in other blocks
    adjusted = rows._adjust(2 * BLOCK, LENGTH)
    rows.seq_lengths = (2 * BLOCK, LENGTH)
    q, k, v = inputs(length=2 * BLOCK, kv_length=LENGTH)
    at = torch.arange(LENGTH)
    keep = (at[: 2 * BLOCK, None] + BLOCK >= at).expand(BATCH, HEADS, -1, -1)
    for part in (rows, adjusted):
        torch.testing.assert_close(flashgen.flex_attention(q, k, v, block_mask=part), masked(q, k, v, keep))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_inputs_that_are_no_tensors_are_refused_by_name(name):
    given = dict(zip(("query", "key", "value"), inputs(), strict=True)) | {name: torch.zeros(3, 4)}
    with pytest.raises(flashgen.LaunchError, match=f"{name} is no tensor of"):
        flashgen.flex_attention(**given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"block_mask": lambda b, h, q, k: q >= k}, r"(?s)block_mask is a function.*nearest: create_block_mask"),
        ({"kernel_options": 3}, "kernel_options is a int: it is a dict"),
        ({"return_lse": "no"}, "return_lse is a str and must be True or False"),
        ({"enable_gqa": "x"}, "enable_gqa is a str and must be True or False"),
        pytest.param(
            {"return_aux": True},
            r"(?s)return_aux is a bool.*nearest: return_aux=AuxRequest",
            marks=pytest.mark.skipif(not hasattr(torchs, "AuxRequest"), reason="this PyTorch has no return_aux"),
        ),
    ],
)
def test_arguments_of_other_types_are_refused_by_name(named, reason):
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(flashgen.LaunchError, match=reason):
        flashgen.flex_attention(x, x, x, **named)


def test_torch_compile_leaves_the_call_between_graphs():
    block_mask = create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    q, k, v = (x.requires_grad_() for x in inputs())

    def block(q):
        return flashgen.flex_attention(q * 2, k, v, block_mask=block_mask) + 1

    found = torch.compile(block, backend="eager")(q)
    torch.testing.assert_close(found, block(q))
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), q)[0] for o in (found, block(q))))
