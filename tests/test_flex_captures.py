"""from_flex: numbers that hide from a walk over what a function reads, and named numbers out of its reach."""

import collections
import dataclasses
import enum
import functools
import numbers
import os
import sys
import threading
import types
from typing import NamedTuple

import pytest
import torch
from test_flex_traces import LENGTH, attend, masked, traces

import flashgen
from flashgen.frontends import flex

WIDTH = 8


@pytest.fixture(autouse=True)
def forgotten():
    flex._known.clear()


class Number(int):
    pass


class Real(float):
    pass


def of_attribute(base):
    """A mask that reads an attribute of an object of a class made of `base`."""
    kind = type("Config", (base,), {})

    def made(window):
        config = kind()
        config.window = window
        return lambda b, h, q, k: (q >= k) & (q - k < config.window)

    return made


def of_function(window):
    def mask_mod(b, h, q, k):
        return (q >= k) & (q - k < mask_mod.window)

    mask_mod.window = window
    return mask_mod


def of_tensor(window):
    tensor = torch.arange(3)
    tensor.window = window
    return lambda b, h, q, k: (q >= k) & (q - k < tensor.window)


def of_mapping(window):
    settings = type("Settings", (collections.UserDict,), {})(window=window)
    return lambda b, h, q, k: (q >= k) & (q - k < settings["window"])


def of_module(window):
    module = torch.nn.Identity()
    module.windows = [window]
    return lambda b, h, q, k: (q >= k) & (q - k < module.windows[0])


def of_import(window):
    sys.modules["settings_of_a_test"] = types.ModuleType("settings_of_a_test")
    sys.modules["settings_of_a_test"].window = window

    def mask_mod(b, h, q, k):
        from settings_of_a_test import window

        return (q >= k) & (q - k < window)

    return mask_mod


def of_place(window):
    tensor = torch.zeros(4, 5) if window < 10 else torch.zeros(5, 4).T
    return lambda b, h, q, k: (q >= k) & (q - k < (5 if tensor.is_contiguous() else 30))


def of_type(window):
    tensor = torch.zeros(4, 5) if window < 10 else torch.nn.Parameter(torch.zeros(4, 5))
    return lambda b, h, q, k: (q >= k) & (q - k < (30 if isinstance(tensor, torch.nn.Parameter) else 5))


def of_set(window):
    distances = {float(window), (0, window)} - {(0, window)}
    return lambda b, h, q, k: (q >= k) & (q - k < max(distances))


def of_order(window):
    ordered = collections.OrderedDict(a=5, b=30)
    if window == 30:
        ordered.move_to_end("a")
    return lambda b, h, q, k: (q >= k) & (q - k < next(iter(ordered.values())))


class Kinds(enum.Enum):
    ONE = enum.auto()

    def near(self, distance):
        return distance < REACH


REACH = 5


def of_member(window):
    Kinds.ONE.window = window
    return lambda b, h, q, k: (q >= k) & (q - k < Kinds.ONE.window)


def of_method_of_member(window):
    global REACH
    REACH, kind = window, Kinds.ONE
    return lambda b, h, q, k: (q >= k) & kind.near(q - k)


def of_pattern(window):
    @dataclasses.dataclass
    class Config:
        window: int

    config = CONFIGS.setdefault(Config.__qualname__, Config(0))
    config.window = window

    def mask_mod(b, h, q, k):
        match config:
            case object(window=wanted):
                return (q >= k) & (q - k < wanted)

    return mask_mod


CONFIGS = {}


def of_environment(window):
    os.environ["WINDOW_OF_A_TEST"] = str(window)

    def mask_mod(b, h, q, k):
        import os

        return (q >= k) & (q - k < int(os.environ["WINDOW_OF_A_TEST"]))

    return mask_mod


class Reaching:
    """What a mask makes an object of: each method reads the global number, and no code has the name of one."""

    def __init__(self, distance=0):
        self.near = distance < REACH

    def __call__(self, distance):
        return distance < REACH

    def __getitem__(self, distance):
        return distance < REACH

    def __gt__(self, distance):
        return distance < REACH

    def __enter__(self):
        return REACH

    def __exit__(self, *_):
        pass

    def __class_getitem__(cls, distance):
        return distance < REACH


class Static:
    @staticmethod
    def __call__(distance):
        return distance < REACH


class New:
    def __new__(cls, distance):
        made = super().__new__(cls)
        made.near = distance < REACH
        return made


@dataclasses.dataclass
class Post:
    distance: object
    held: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.near = self.distance < REACH


class Meta(type):
    @property
    def reach(cls):
        return REACH

    def __call__(cls, distance):
        return distance < REACH


class OfMeta(metaclass=Meta):
    pass


class CalledKinds(enum.Enum):
    ONE = enum.auto()

    def __call__(self, distance):
        return distance < REACH


class Near(torch.nn.Module):
    def forward(self, distance):
        return distance < REACH


def entered(distance):
    with Reaching() as reach:
        return distance < reach


def made_by_a_function():
    return Static()


LAZY = types.ModuleType("lazy_module_of_a_test")
exec("WINDOW = 5\ndef __getattr__(name): return WINDOW", LAZY.__dict__)
HOOKED, ONE, POST = torch.nn.Identity(), CalledKinds.ONE, Post(0)

#: What is near, by the global number that methods read.
MAKING = {
    "__init__": lambda x: Reaching(x).near,
    "__new__": lambda x: New(x).near,
    "__post_init__": lambda x: Post(x).near,
    "__call__": lambda x: Reaching()(x),
    "static __call__": lambda x: Static()(x),
    "made by a function": lambda x: made_by_a_function()(x),
    "__getitem__": lambda x: Reaching()[x],
    "operator": lambda x: Reaching() > x,
    "__enter__": entered,
    "__class_getitem__": lambda x: Reaching[x],
    "metaclass": lambda x: OfMeta(x),
    "property of a metaclass": lambda x: x < OfMeta.reach,
    "member of a class": lambda x: CalledKinds.ONE(x),
    "member": lambda x: ONE(x),
    "forward": lambda x: Near()(x),
    "class of an object": lambda x: type(POST)(x).near,
    "replaced": lambda x: dataclasses.replace(POST, distance=x).near,
    "lazy module": lambda x: x < LAZY.window_of_a_test,
    "hook": lambda x: HOOKED(x) < 30,
}


@pytest.mark.parametrize("name", MAKING)
def test_what_methods_without_a_name_in_code_read_is_noticed(name):
    """The trace of another number is not taken, and that of the same one is."""
    global REACH
    near, at = MAKING[name], torch.arange(LENGTH)
    distance = at[:, None] - at[None]
    for window in (5, 30):
        REACH = LAZY.WINDOW = window
        hook = HOOKED.register_forward_hook(lambda module, given, made, window=window: made + 30 - window)
        for count in (1, 0):
            before = flex.traces
            made = flashgen.from_flex(lambda b, h, q, k: near(q - k))
            assert flex.traces - before == count
            torch.testing.assert_close(attend(made), masked(distance < window))
        hook.remove()


class Fields(NamedTuple):
    window: int


class Attributes(dict):
    __getattr__ = dict.__getitem__


REMEMBERED = {
    "named tuple": lambda: Fields(5),
    "defaultdict": lambda: collections.defaultdict(int, window=5),
    "counter": lambda: collections.Counter(window=5),
    "attributes": lambda: Attributes(window=5),
    "mapping": lambda: types.SimpleNamespace(window=5),
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_what_holds_numbers_is_not_traced_again(name):
    def made():
        held = REMEMBERED[name]()
        if isinstance(held, dict) and not isinstance(held, Attributes):
            return lambda b, h, q, k: q - k < held["window"]
        return lambda b, h, q, k: q - k < held.window

    assert traces(lambda: [flashgen.from_flex(made()) for _ in range(3)]) == 1


def test_attributes_of_functions_that_nobody_reads_cost_no_trace():
    def made():
        mask = functools.wraps(windowed(3))(lambda b, h, q, k: q >= k)
        mask.lock = threading.Lock()
        return mask

    assert traces(lambda: [flashgen.from_flex(made()) for _ in range(3)]) == 1


@pytest.mark.parametrize(
    "made",
    [
        *(of_set, of_order, of_environment, of_member, of_method_of_member, of_pattern),
        *map(of_attribute, (dict, list, tuple, set, str, collections.OrderedDict, collections.defaultdict)),
        *(of_function, of_tensor, of_mapping, of_module, of_import, of_place, of_type),
        *(lambda window, kind=kind: windowed(kind(window)) for kind in (Number, Real)),
    ],
)
def test_what_hides_a_number_is_noticed(made):
    """Attributes of functions, tensors and containers, numbers of classes of their own, imports and places."""
    at = torch.arange(LENGTH)
    distance = at[:, None] - at[None]
    for window in (5, 30):
        kept = (distance >= 0) & (distance < window)
        torch.testing.assert_close(attend(flashgen.from_flex(made(window))), masked(kept))


def windowed(window):
    return lambda b, h, q, k: (q >= k) & (q - k < window)


class Windowed:
    """A mask as an object, whose method reads a global number, and a helper of it."""

    def __call__(self, b, h, q, k):
        return self.near(b, h, q, k)

    def near(self, b, h, q, k):
        return (q >= k) & (q - k < WIDTH)


class Called:
    def __call__(self, b, h, q, k):
        return (q >= k) & (q - k < WIDTH)


class Held:
    def near(self, b, h, q, k):
        return (q >= k) & (q - k < WIDTH)


@pytest.mark.parametrize("function", [Called(), Held().near])
def test_named_numbers_of_methods_are_parameters(function):
    at = torch.arange(LENGTH)
    distance = at[:, None] - at[None]
    variant = flashgen.from_flex(function, names=("WIDTH",))
    for width in (3, 30):
        kept = (distance >= 0) & (distance < width)
        torch.testing.assert_close(attend(variant, WIDTH=width), masked(kept))


def test_named_numbers_that_no_parameter_reaches_are_refused():
    """Half of what reads a number as a parameter, and half as a constant, would be wrong without a word."""
    with pytest.raises(flashgen.SpecError, match=r"(?s)'WIDTH', which 'Windowed.near' reads: no.*nearest"):
        flashgen.from_flex(Windowed(), names=("WIDTH",))
    held = Windowed()
    with pytest.raises(flashgen.SpecError, match=r"'WIDTH', which 'Windowed\.near' reads"):
        flashgen.from_flex(lambda b, h, q, k: (q - k < WIDTH) & held.near(b, h, q, k), names=("WIDTH",))


class Unasked:
    """A method that reads the number and that no mask calls."""

    heads = 2

    def __len__(self):
        return WIDTH


def test_named_numbers_that_nobody_reads_out_of_reach_are_parameters():
    unasked, at = Unasked(), torch.arange(LENGTH)
    held = {"near": lambda q, k: q - k < WIDTH}
    held["self"] = held
    distance = at[:, None] - at[None]
    for mask in (
        lambda b, h, q, k: (q >= k) & (q - k < WIDTH) & (h < unasked.heads),
        lambda b, h, q, k: (q >= k) & held["near"](q, k),
        functools.partial(lambda b, h, q, k, near: (q >= k) & near(q, k), near=held["near"]),
    ):
        variant = flashgen.from_flex(mask, names=("WIDTH",))
        for width in (3, 30):
            torch.testing.assert_close(attend(variant, WIDTH=width), masked((distance >= 0) & (distance < width)))


def test_named_numbers_of_64_bits_have_a_trace_of_their_own():
    at = torch.arange(LENGTH)
    distance = at[:, None] - at[None]
    for window in (5, 1 << 31):
        variant = flashgen.from_flex(windowed(window), names=("window",))
        torch.testing.assert_close(attend(variant), masked((distance >= 0) & (distance < window)))


def reach(d, n):
    return d if n == 0 else reach(d - WIDTH, n - 1)


def here(d, n):
    return d if n == 0 else there(d - WIDTH, n - 1)


def there(d, n):
    return d if n == 0 else here(d - WIDTH, n - 1)


def in_closures(width):
    def first(d, n):
        return d if n == 0 else second(d - width, n - 1)

    def second(d, n):
        return d if n == 0 else first(d - width, n - 1)

    return lambda b, h, q, k: first(q - k, 3) < 1


def through_a_list(width):
    parts = []
    parts.append(lambda d, n: d if n == 0 else parts[0](d - width, n - 1))
    parts.append(parts)
    return lambda b, h, q, k: parts[1][0](q - k, 3) < 1


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (lambda b, h, q, k: reach(q - k, 3) < 1, "WIDTH"),
        (lambda b, h, q, k: here(q - k, 3) < 1, "WIDTH"),
        (in_closures(8), "width"),
        (through_a_list(8), "width"),
    ],
)
def test_named_numbers_of_functions_that_call_themselves_are_parameters(mask, name):
    at = torch.arange(LENGTH)
    variant = flashgen.from_flex(mask, names=(name,))
    assert [p.name for p in variant.params] == [name]
    for width in (3, 8, 12):
        kept = at[:, None] - at[None] - 3 * width < 1
        torch.testing.assert_close(attend(variant, **{name: width}), masked(kept))


def near(d):
    return d < WIDTH


class Asks:
    def near(self, d):
        return near(d)


@functools.lru_cache
def cached_width():
    return WIDTH


@functools.lru_cache
def cached_twice(n):
    return cached_width() if n == 0 else cached_twice(n - 1)


def hidden_in_a_closure(window):
    held = collections.deque([lambda d: d < window])
    return lambda b, h, q, k: (q - k < window) & held[0](k - q)


DEQUE, PROXY, SET, CACHE_IN_A_DEQUE = (
    collections.deque([near]),
    types.MappingProxyType({"near": near}),
    {near},
    collections.deque([cached_width]),
)
MODULE, NEAR = sys.modules[__name__], Asks()

HIDDEN = {
    "deque": (lambda b, h, q, k: (q - k < WIDTH) & DEQUE[0](k - q), "near"),
    "also reached": (lambda b, h, q, k: near(q - k) & DEQUE[0](k - q), "near"),
    "proxy": (lambda b, h, q, k: (q - k < WIDTH) & PROXY["near"](k - q), "near"),
    "set": (lambda b, h, q, k: (q - k < WIDTH) & next(iter(SET))(k - q), "near"),
    "getattr": (lambda b, h, q, k: (q - k < WIDTH) & getattr(MODULE, "near")(k - q), "near"),  # noqa: B009
    "method that calls a helper": (lambda b, h, q, k: near(q - k) & NEAR.near(k - q), "near"),
    "closure": (hidden_in_a_closure(8), r"hidden_in_a_closure\.<locals>\.<lambda>"),
    "cache": (lambda b, h, q, k: (q - k < WIDTH) & (k - q < cached_width()), "cached_width"),
    "recursive cache": (lambda b, h, q, k: (q - k < WIDTH) & (k - q < cached_twice(2)), "cached_(width|twice)"),
    "cache in a deque": (lambda b, h, q, k: (q - k < WIDTH) & (k - q < CACHE_IN_A_DEQUE[0]()), "cached_width"),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_named_numbers_of_hidden_readers_are_refused(what):
    """What reads a number where nobody looks, or read it before, would stay a constant without a word."""
    mask, reader = HIDDEN[what]
    name = "window" if what == "closure" else "WIDTH"
    cached_width(), cached_twice(2)
    with pytest.raises(flashgen.SpecError, match=rf"(?s)names has '{name}', which '{reader}' reads.*nearest: "):
        flashgen.from_flex(mask, names=(name,))
    flashgen.from_flex(mask)


@functools.lru_cache
def of_heads(n):
    return 2 * n


HELD = collections.deque([lambda d: d > -4, near])


def test_what_hides_no_reader_of_a_named_number_is_served():
    """Caches and containers of other functions, one that is not called, and a variable of the function's own."""

    def local(d):
        WIDTH = 30
        return (lambda d: d < WIDTH)(d)

    def mask(b, h, q, k):
        return (q >= k) & (q - k < WIDTH) & HELD[0](q - k) & (h < of_heads(4)) & local(k - q)

    at, before = torch.arange(LENGTH), sys.getprofile()
    variant = flashgen.from_flex(mask, names=("WIDTH",))
    assert sys.getprofile() is before
    for width in (3, 20):
        distance = at[:, None] - at[None]
        torch.testing.assert_close(attend(variant, WIDTH=width), masked((distance >= 0) & (distance < width)))


def by_isinstance(window):
    def mask(b, h, q, k):
        width = window if isinstance(window, int) else window[h]  # a number, or a tensor of one per head
        return (q >= k) & (q - k < width)

    return mask


def by_isinstance_of_a_helper(window):
    def sized(n):
        return n if isinstance(n, numbers.Number) and not isinstance(n, (torch.Tensor, float, bool)) else 0

    return lambda b, h, q, k: (q >= k) & (q - k < sized(2 * window) - window)


def by_match(window):
    def mask(b, h, q, k):
        match window:
            case int():
                return (q >= k) & (q - k < window)
        return q == k

    return mask


@pytest.mark.parametrize("made", [by_isinstance, by_isinstance_of_a_helper, by_match])
def test_a_parameter_is_of_its_number_s_type(made):
    at = torch.arange(LENGTH)
    variant = flashgen.from_flex(made(5), names=("window",))
    for width in (5, 20):
        kept = (at[:, None] - at[None] >= 0) & (at[:, None] - at[None] < width)
        torch.testing.assert_close(attend(variant, window=width), masked(kept))


def by_type(window):
    return lambda b, h, q, k: (q - k < window) if type(window) is int else q == k


def by_type_in_a_helper(window):
    def number(x):
        return type(x) in (int, float)

    return lambda b, h, q, k: (q - k < window) if number(window) else q == k


WIDTHS = {"5": 5, "20": 20}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (by_type, "made no parameter of it: no operation met it, and its type was asked for"),
        (by_type_in_a_helper, "made no parameter of it"),
        (lambda window: lambda b, h, q, k: q - k < WIDTHS.get(f"{window}", 0), "the text of a parameter"),
        (lambda window: lambda b, h, q, k: q - k < WIDTHS.get(str(window), window), "the text of a parameter"),
    ],
)
def test_named_numbers_whose_type_or_text_decides_are_refused(made, message):
    with pytest.raises(flashgen.SpecError, match=message):
        flashgen.from_flex(made(5), names=("window",))
    torch.testing.assert_close(attend(flashgen.from_flex(made(5))), masked(kept_below(5)))


def kept_below(width):
    at = torch.arange(LENGTH)
    return at[:, None] - at[None] < width


def test_a_named_number_that_nothing_needs_is_no_parameter():
    """By a branch that is not taken, or since nothing asks for what it was added to."""

    def untaken(window, far):
        return lambda b, h, q, k: q >= k if far else q - k < window

    def discarded(window, far):
        def mask(b, h, q, k):
            _ = k + window
            return (q >= k) & (type(far) is bool)

        return mask

    for made in (untaken, discarded):
        variant = flashgen.from_flex(made(5, True), names=("window",))
        assert not variant.params
        torch.testing.assert_close(attend(variant), masked(torch.ones(LENGTH, LENGTH).tril().bool()))


def test_the_text_of_a_size_is_that_of_its_number():
    table = torch.arange(5)
    torch.testing.assert_close(
        attend(flashgen.from_flex(lambda b, h, q, k: q - k < WIDTHS[f"{table.shape[0]}"])), masked(kept_below(5))
    )
