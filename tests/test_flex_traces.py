"""from_flex on functions that are made anew for each batch: what is traced again, and what is kept."""

import functools
import gc
import math
import pickle
import random
import types
import warnings
import weakref

import pytest
import torch
from cli import flashgen as command

import flashgen
from flashgen.frontends import flex
from flashgen.lang.expr import walk

LENGTH = 70
SCALE_OF_SCORES = 2.0
WIDTH = 8


@pytest.fixture(autouse=True)
def forgotten():
    flex._known.clear()


def traces(run):
    before = flex.traces
    run()
    return flex.traces - before


def attend(variant, length=LENGTH, seed=0, **named):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, length, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    return flashgen.attention(q, k, v, variant, **named)


def masked(keep, length=LENGTH, seed=0):
    """Attention by a mask that is written out."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, length, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    return torch.softmax((q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~keep, -torch.inf), -1) @ v


def documents(ids, window=20):
    def mask_mod(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx - kv_idx < window)

    return mask_mod


def same(ids, window=20):
    at = torch.arange(len(ids))
    return (ids[:, None] == ids[None]) & (at[:, None] - at[None] < window)


def ids_of(seed, length=LENGTH):
    return torch.randint(0, 3, (length,), generator=torch.Generator().manual_seed(seed))


def test_new_tensors_are_not_traced_again():
    variants = []
    assert traces(lambda: variants.extend(flashgen.from_flex(documents(ids_of(seed))) for seed in range(5))) == 1
    assert len({variant.token for variant in variants}) == 1 and len(set(variants)) == 1
    for seed, variant in enumerate(variants):
        torch.testing.assert_close(attend(variant), masked(same(ids_of(seed))))


def test_new_contents_are_read_when_a_call_runs():
    ids = ids_of(0)
    variant = flashgen.from_flex(documents(ids))
    ids.copy_(ids_of(1))
    torch.testing.assert_close(attend(variant), masked(same(ids_of(1))))


def test_tensors_are_those_of_the_function_and_not_copies():
    ids = ids_of(0)
    assert [x is ids for x in flashgen.from_flex(documents(ids)).given.values()] == [True]


def test_a_new_length_is_not_traced_again():
    def both():
        for length in (70, 33, 131):
            torch.testing.assert_close(
                attend(flashgen.from_flex(documents(ids_of(0, length))), length),
                masked(same(ids_of(0, length)), length),
            )

    assert traces(both) == 1


def test_shapes_that_decide_the_trace_are_traced_for_each():
    def mod(marks):
        return lambda b, h, q, k: (q == k) | (marks == k).any()

    def all_of():
        for marks in ([1, 2], [5, 6], [1, 2, 3], [1, 2]):
            keep = torch.eye(LENGTH, dtype=torch.bool)
            keep[:, marks] = True
            torch.testing.assert_close(attend(flashgen.from_flex(mod(torch.tensor(marks)))), masked(keep))

    assert traces(all_of) == 2
    with pytest.raises(flashgen.LaunchError, match="dimension 0 must be 2"):
        attend(flashgen.from_flex(mod(torch.tensor([1, 2]))), marks=torch.tensor([1, 2, 3]))


def test_sizes_that_are_numbers_of_the_mask_are_read_at_run_time():
    def mod(table):
        return lambda b, h, q, k: table[k % table.shape[0]] | (q % len(table) == 0) | (q == k)

    def all_of():
        for size in (3, 5, 8):
            table = ids_of(size, size) == 0
            at = torch.arange(LENGTH)
            keep = table[at % size][None] | (at % size == 0)[:, None] | torch.eye(LENGTH, dtype=torch.bool)
            torch.testing.assert_close(attend(flashgen.from_flex(mod(table))), masked(keep))

    assert traces(all_of) == 2 + 1  # len() is a Python number, and so are the shapes it was read from


def test_other_dtypes_and_dimensions_are_traced():
    ids = ids_of(0)
    assert traces(lambda: flashgen.from_flex(documents(ids))) == 1
    assert traces(lambda: flashgen.from_flex(documents(ids.int()))) == 1

    def of_batch(ids):
        return lambda b, h, q, k: ids[..., q] == ids[..., k]

    assert traces(lambda: flashgen.from_flex(of_batch(ids))) == 1


def test_a_function_of_both_kinds_is_traced_for_each():
    def mod(*given):
        *score, _, _, q, k = given
        return torch.where(q >= k, score[0] if score else torch.tensor(True), -torch.inf if score else False)

    mask, score = flashgen.from_flex(mod), flashgen.from_flex(None, mod)
    assert mask.score_node is None and score.mask is None
    torch.testing.assert_close(attend(mask), attend(score))


def test_two_tensors_are_not_one():
    def mod(left, right):
        return lambda b, h, q, k: left[q] == right[k]

    one, other = ids_of(0), ids_of(1)
    assert traces(lambda: flashgen.from_flex(mod(one, one))) == 1
    variant = flashgen.from_flex(mod(one, other))
    assert len(variant.given) == 2
    torch.testing.assert_close(attend(variant), masked(one[:, None] == other[None]))


def test_numbers_are_constants():
    ids = ids_of(0)
    variants = [flashgen.from_flex(documents(ids, window)) for window in (5, 9, 5)]
    assert variants[0].token == variants[2].token != variants[1].token
    torch.testing.assert_close(attend(variants[1]), masked(same(ids, 9)))


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (1, 1.0), (1, True), (math.inf, -math.inf)])
def test_numbers_that_are_equal_or_alike_are_told_apart(numbers):
    def mod(number):
        return lambda score, b, h, q, k: torch.where(q >= k, score, score * number if number != 1 else score + number)

    assert traces(lambda: [flashgen.from_flex(score_mod=mod(number)) for number in numbers]) == 2


def test_a_named_number_is_a_parameter():
    ids = ids_of(0)

    def all_of():
        for window in range(3, 15):
            variant = flashgen.from_flex(documents(ids, window), names=("window",))
            assert [p.name for p in variant.params] == ["window"] and variant.given["window"] == window
            torch.testing.assert_close(attend(variant), masked(same(ids, window)))
        torch.testing.assert_close(attend(variant, window=40), masked(same(ids, 40)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert traces(all_of) == 1


def test_named_numbers_of_helpers_defaults_and_globals_are_parameters():
    def factory(near):
        def close(q, k):
            return abs(q - k) < near

        def mod(score, b, h, q, k, shift=0.5):
            return torch.where(close(q, k), score * SCALE_OF_SCORES, score + shift)

        return mod

    variant = flashgen.from_flex(score_mod=factory(9), names=["near", "shift", "SCALE_OF_SCORES"])
    assert variant.given == {"near": 9, "shift": 0.5, "SCALE_OF_SCORES": 2.0}
    constant = flashgen.from_flex(score_mod=factory(9))
    torch.testing.assert_close(attend(variant), attend(constant))
    assert not torch.allclose(attend(variant, near=30), attend(constant))


def test_names_that_nothing_has_are_refused():
    with pytest.raises(flashgen.SpecError, match=r"names has 'widnow'.*it reads window"):
        flashgen.from_flex(documents(ids_of(0)), names=("widnow",))
    with pytest.raises(flashgen.SpecError, match=r"names is a tuple of names, as in names=\('window',\)"):
        flashgen.from_flex(documents(ids_of(0)), names="window")


def test_many_numbers_are_told_once_with_their_name():
    ids = ids_of(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for window in range(20):
            flashgen.from_flex(documents(ids, window + 1))
    assert len(told) == 1
    assert "'mask_mod' was compiled for 9 sets of numbers; 'window' differs" in str(told[0].message)
    assert "names=('window',)" in str(told[0].message)
    assert told[0].filename == __file__


def test_what_is_read_of_objects_is_noticed():
    class Config:
        def __init__(self):
            self.window, self.unread, self.tables = 5, 0, {"ids": [ids_of(0)]}

        def near(self, q, k):
            return abs(q - k) < self.window

    config = Config()

    def mask_mod(b, h, q, k):
        return config.near(q, k) & (config.tables["ids"][0][q] == config.tables["ids"][0][k])

    def expected(window, ids):
        at = torch.arange(LENGTH)
        return masked(((at[:, None] - at[None]).abs() < window) & (ids[:, None] == ids[None]))

    torch.testing.assert_close(attend(flashgen.from_flex(mask_mod)), expected(5, ids_of(0)))
    config.unread = 1
    config.tables["ids"][0] = ids_of(3)
    before = flex.traces
    torch.testing.assert_close(attend(flashgen.from_flex(mask_mod)), expected(5, ids_of(3)))
    assert flex.traces == before
    config.window = 11
    torch.testing.assert_close(attend(flashgen.from_flex(mask_mod)), expected(11, ids_of(3)))


class Base:
    reach = 3

    def __init__(self, window):
        self.window = window

    def near(self, q, k):
        return abs(q - k) < self.window


class Derived(Base):
    __slots__ = ("slot",)

    def near(self, q, k):
        return super().near(q, k) | (abs(q - k) == self.slot) | (k < self.reach)


class Rows:
    def __init__(self, step):
        self.step = step

    def __getitem__(self, i):
        return i // self.step

    @property
    def double(self):
        return self.step * 2


@pytest.mark.parametrize("name", ["window", "slot", "reach", "step", "attribute"])
def test_numbers_of_classes_are_noticed_wherever_they_are_read(name, monkeypatch):
    thing, rows = Derived(4), Rows(5)
    thing.slot = 9
    layers = torch.nn.ModuleList([torch.nn.Module()])
    layers[0].attribute = 7

    def mask_mod(b, h, q, k):
        return thing.near(q, k) | (rows[q] == rows[k]) | (k % rows.double == 1) | (q % layers[0].attribute == 1)

    def written_out():
        at = torch.arange(LENGTH)
        q, k = at[:, None], at[None]
        distance, step = (q - k).abs(), rows.step
        keep = (distance < thing.window) | (distance == thing.slot) | (k < thing.reach)
        return masked(keep | (q // step == k // step) | (k % (2 * step) == 1) | (q % layers[0].attribute == 1))

    torch.testing.assert_close(attend(flashgen.from_flex(mask_mod)), written_out())
    assert traces(lambda: flashgen.from_flex(mask_mod)) == 0
    holder = {"window": thing, "slot": thing, "reach": Base, "step": rows, "attribute": layers[0]}[name]
    monkeypatch.setattr(holder, name, getattr(holder, name) + 8)
    torch.testing.assert_close(attend(flashgen.from_flex(mask_mod)), written_out())


def test_modules_of_torch_are_not_traced_again():
    def mod(scale):
        table, soft = torch.nn.Embedding(4, 1), torch.nn.Softplus(beta=scale)
        return lambda score, b, h, q, k: soft(score) + table(k % 4)[0]

    assert traces(lambda: [flashgen.from_flex(score_mod=mod(2.0)) for _ in range(3)]) == 1
    assert traces(lambda: flashgen.from_flex(score_mod=mod(3.0))) == 1


def test_what_reads_by_texts_or_by_chance_is_traced_each_time():
    box = types.SimpleNamespace(window=5)

    def by_text(b, h, q, k):
        return abs(q - k) < getattr(box, "win" + "dow")

    assert traces(lambda: [flashgen.from_flex(lambda b, h, q, k: q - k < box.window) for _ in range(2)]) == 1
    first = flashgen.from_flex(by_text)
    box.window = 11
    assert flashgen.from_flex(by_text).token != first.token

    def by_chance(b, h, q, k):
        return abs(q - k) < random.randint(1, 1 << 20)

    assert flashgen.from_flex(by_chance).token != flashgen.from_flex(by_chance).token


def test_globals_and_functions_that_change_are_noticed():
    scope = {"torch": torch, "WINDOW": 4, "ids": ids_of(0), "near": lambda x, w: abs(x) < w}
    exec("def mask_mod(b, h, q, k): return near(q - k, WINDOW) & (ids[q] == ids[k])", scope)
    at = torch.arange(LENGTH)
    distance, alike = at[:, None] - at[None], ids_of(0)[:, None] == ids_of(0)[None]
    torch.testing.assert_close(attend(flashgen.from_flex(scope["mask_mod"])), masked((distance.abs() < 4) & alike))
    scope["WINDOW"] = 9
    torch.testing.assert_close(attend(flashgen.from_flex(scope["mask_mod"])), masked((distance.abs() < 9) & alike))
    scope["near"] = lambda x, w: (x < w) & (x >= 0)
    keep = (distance < 9) & (distance >= 0) & alike
    torch.testing.assert_close(attend(flashgen.from_flex(scope["mask_mod"])), masked(keep))


def test_what_says_nothing_about_itself_is_traced_each_time():
    class Settings:
        def __init__(self, value):
            self.values = {"window": value}

        def __getattr__(self, name):
            return self.values[name]

    settings = Settings(6)

    def mask_mod(b, h, q, k):
        return abs(q - k) < settings.window

    first = flashgen.from_flex(mask_mod)
    settings.values["window"] = 12
    second = flashgen.from_flex(mask_mod)
    assert first.token != second.token
    assert traces(lambda: flashgen.from_flex(mask_mod)) == 1
    assert flashgen.from_flex(mask_mod).token == second.token


def test_partials_and_callable_objects_are_not_traced_again():
    class Mod:
        def __init__(self, ids):
            self.ids = ids

        def __call__(self, b, h, q, k):
            return self.ids[q] == self.ids[k]

    def mod(ids, b, h, q, k):
        return ids[q] == ids[k]

    def all_of():
        for seed in range(3):
            ids = ids_of(seed)
            for made in (Mod(ids), functools.partial(mod, ids)):
                torch.testing.assert_close(attend(flashgen.from_flex(made)), masked(ids[:, None] == ids[None]))

    assert traces(all_of) == 2


@pytest.mark.slow
def test_many_functions_leave_nothing_behind():
    dead = []

    def run(count):
        for seed in range(count):
            ids = ids_of(seed)
            dead.append(weakref.ref(ids))
            flashgen.from_flex(documents(ids))

    run(1)
    kept = [(len(flex._known), len(known.traces)) for known in flex._known.values()]
    assert traces(lambda: run(10_000)) == 0
    gc.collect()
    assert not [ref for ref in dead if ref() is not None]
    assert [(len(flex._known), len(known.traces)) for known in flex._known.values()] == kept


@pytest.mark.slow
@pytest.mark.parametrize("combined", [False, True])
def test_a_call_leaves_no_tensor_behind(combined):
    number = 1000 + combined  # what equals an earlier variant would be planned already

    def run():
        ids, slopes = ids_of(0), torch.tensor([0.1, 0.2])
        variant = flashgen.from_flex(lambda b, h, q, k: ids[q] + number > ids[k] + k)
        if combined:
            variant = variant & flashgen.from_flex(score_mod=lambda score, b, h, q, k: score - slopes[h] * k)
        attend(variant)
        return weakref.ref(ids), weakref.ref(variant)

    dead = run()
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


def test_numbers_are_kept_to_a_limit():
    ids = ids_of(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for window in range(flex.MAX_TRACES + 20):
            flashgen.from_flex(documents(ids, window + 1))
    assert [len(known.traces) for known in flex._known.values()] == [flex.MAX_TRACES]


@pytest.mark.slow
def test_code_is_held_weakly():
    def make():
        scope = {}
        exec("def mask_mod(b, h, q, k): return q >= k", scope)
        flashgen.from_flex(scope["mask_mod"])
        return weakref.ref(scope["mask_mod"].__code__)

    code = make()
    gc.collect()
    assert code() is None


def test_an_expression_of_variants_gives_what_both_give():
    ids, slopes = ids_of(0), torch.tensor([0.1, 0.2])
    mask = flashgen.from_flex(documents(ids))
    score = flashgen.from_flex(score_mod=lambda score, b, h, q, k: score - slopes[h] * abs(q - k))
    both = mask & score
    assert set(both.given) == {"ids", "slopes"}
    together = flashgen.from_flex(documents(ids), lambda score, b, h, q, k: score - slopes[h] * abs(q - k))
    torch.testing.assert_close(attend(both), attend(together))
    with pytest.raises(flashgen.SpecError, match="capture different things by the name 'ids'"):
        mask & flashgen.from_flex(documents(ids_of(1), 3))


def test_what_an_operator_leaves_out_is_not_given():
    variant = flashgen.from_flex(documents(ids_of(0))) | flashgen.variant()
    assert variant.given == {}
    torch.testing.assert_close(attend(variant), masked(torch.ones(LENGTH, LENGTH, dtype=torch.bool)))
    other = ~flashgen.from_flex(documents(ids_of(0)))
    torch.testing.assert_close(attend(other), masked(~same(ids_of(0))))


def test_gradients_come_home():
    weights = torch.randn(3, 2, requires_grad=True)
    first, cap = weights[1], torch.tensor(1.5, requires_grad=True)

    def mod(score, b, h, q, k):
        return score * first[h] + weights[0, 1] * (k % 2) + cap

    with torch.no_grad():
        variant = flashgen.from_flex(score_mod=mod)
    attend(variant).square().sum().backward()
    assert weights.grad[1].abs().min() > 0 and weights.grad[0, 1] != 0
    assert weights.grad[0, 0] == 0 and weights.grad[2].abs().max() == 0
    assert cap.grad is not None and abs(cap.grad) < 1e-10  # all scores moved by one number


def test_a_variant_is_planned_and_found_without_its_tensors():
    variant = flashgen.from_flex(documents(ids_of(0)))
    assert flashgen.plan(variant, arch="sm_80").variant.given == {}
    assert flashgen.supports(variant) == ()
    assert variant.bare == variant and variant.bare.given == {}
    again = pickle.loads(pickle.dumps(variant))
    torch.testing.assert_close(again.given["ids"], ids_of(0))
    torch.testing.assert_close(attend(again), attend(variant))


def test_a_variant_made_outside_is_compiled_without_a_break():
    ids = ids_of(0)
    variant = flashgen.from_flex(documents(ids))
    compiled = torch.compile(lambda q: flashgen.attention(q, q, q, variant), fullgraph=True, backend="eager")
    q = torch.randn(1, 2, LENGTH, 16)
    torch.testing.assert_close(compiled(q), flashgen.attention(q, q, q, variant))
    ids.copy_(ids_of(4))
    torch.testing.assert_close(compiled(q), flashgen.attention(q, q, q, variant))


@pytest.mark.slow
def test_a_function_may_be_traced_between_graphs():
    ids, q = ids_of(0), torch.randn(1, 2, LENGTH, 16)

    def block(q):
        return flashgen.attention(q * 2, q, q, flashgen.from_flex(documents(ids))) + 1

    torch.testing.assert_close(torch.compile(block, backend="eager")(q), block(q))


def test_numbers_of_python_have_no_width():
    table = ids_of(0, 9)
    variant = flashgen.from_flex(
        lambda b, h, q, k: table[k.clamp(max=table.size(0) - 1)] == table[q % (WIDTH - 1)], names=("WIDTH",)
    )
    assert not [n for n in walk([variant.mask]) if n.op == "cast"]


def test_commands_take_the_tensors_of_a_spec(tmp_path):
    spec = tmp_path / "documents.py"
    spec.write_text(
        "import torch, flashgen\n"
        "ids, shift = torch.arange(200) // 30, torch.tensor(0.5, dtype=torch.bfloat16)\n"
        "documents = flashgen.from_flex(lambda b, h, q, k: ids[q] == ids[k], lambda s, b, h, q, k: s * shift)\n"
    )
    ran = command("plan", str(spec), "--arch", "sm_80", "--seqlen", "200", "--tile", "32x32")
    assert ran.code == 0, ran.err
    assert "empty" in ran.out


def test_functions_without_line_or_name_are_traced():
    assert flashgen.from_flex().name == "full"
    assert flashgen.from_flex(lambda b, h, q, k: q >= k).name == "flex"
    assert flashgen.from_flex(documents(ids_of(0))).name == "mask_mod"
    nothing = types.FunctionType(compile("lambda b, h, q, k: q >= k", "<text>", "eval").co_consts[0], {})
    torch.testing.assert_close(attend(flashgen.from_flex(nothing)), masked(torch.ones(LENGTH, LENGTH).tril().bool()))


def test_modes_of_pytorch_are_asked_at_each_call():
    """By a function that asks for them: any other is remembered whatever they are."""

    def by_grad(b, h, q, k):
        return (q - k < 1) if torch.is_grad_enabled() else (q - k < 3)

    def by_dtype(b, h, q, k):
        return (q - k < 1) if torch.get_default_dtype() is torch.float64 else (q - k < 3)

    narrow, wide = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) < n for n in (1, 3))
    for wanted, context in ((narrow, torch.enable_grad), (wide, torch.no_grad), (narrow, torch.enable_grad)):
        with context():
            torch.testing.assert_close(attend(flashgen.from_flex(by_grad)), masked(wanted))
    before = torch.get_default_dtype()
    try:
        for wanted, dtype in ((wide, torch.float32), (narrow, torch.float64), (wide, torch.float32)):
            torch.set_default_dtype(dtype)
            torch.testing.assert_close(attend(flashgen.from_flex(by_dtype)), masked(wanted))
    finally:
        torch.set_default_dtype(before)
