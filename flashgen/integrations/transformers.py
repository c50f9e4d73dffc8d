"""Models of transformers: an attention function and the mask function that goes with it.

transformers describes a mask by a function of positions.  It is traced into a variant, so that no mask lies in memory;
padding, and the position of the first query where a static cache counts it on the device, are captured tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from flashgen.analysis.tanh import LEAST_CAP
from flashgen.errors import LaunchError
from flashgen.frontends.flex import from_flex
from flashgen.integrations.backends import note
from flashgen.integrations.sdpa import CAUSAL, DTYPES, FULL, MASKED, kind
from flashgen.lang.declare import param, tensor
from flashgen.lang.functions import minimum, tanh
from flashgen.lang.load import load_spec
from flashgen.lang.ranges import MAX_LENGTH
from flashgen.lang.variant import Variant, variant
from flashgen.locks import Lock
from flashgen.ops import float8
from flashgen.ops.attention import attention

#: What models are told as attn_implementation: transformers takes a name with "flash" in it for a kernel of its hub.
NAME = "fg_attention"

_cap = param("softcap", dtype=float, min=LEAST_CAP)
SOFTCAP = variant(score=lambda s, b, h, q, k: _cap * tanh(s / _cap), name="softcap")

#: Masks with the score of SOFTCAP, by the mask's token.
_capped: dict[str, Variant] = {}
_lock = Lock()


class OwnAttentionError(LaunchError, AttributeError):
    """A model asks its mask for what only tensors have; as an AttributeError, so that `hasattr` says no."""

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"{asked} of attention_mask: this model computes attention by itself, and"
            f" attn_implementation={NAME!r} serves models whose layers ask transformers' AttentionInterface for it\n"
            "  nearest: attn_implementation='eager', or 'sdpa' where the model has it"
        )


class Mask(BlockMask):
    """A traced mask, as models hand it from the mask function to their layers: a variant, and what it captures.

    It is a BlockMask by name alone, because transformers passes no other object on that a caller made beforehand.
    """

    def __init__(self, rule: Variant, given: Mapping[str, Any], size: tuple[int, int, int, int]) -> None:
        self.rule, self.capped = rule, _with_softcap(rule)
        self.given = {
            name: x.view(1) if isinstance(x, torch.Tensor) and not x.dim() else x for name, x in given.items()
        }
        self._size = size

    @property
    def shape(self) -> tuple[int, ...]:
        return self._size

    @property
    def ndim(self) -> int:
        return len(self._size)

    def dim(self) -> int:
        return self.ndim

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A model that adds its mask to scores computes attention by itself."""
        raise OwnAttentionError(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> Any:
        """So does one that asks for what a tensor has and this does not."""
        if name.startswith("__"):
            raise AttributeError(f"a Mask has no {name}")
        raise OwnAttentionError(name)

    def __getitem__(self, index: Any) -> Any:
        """And one that takes a part of it."""
        raise OwnAttentionError("a part")

    def to(self, *_: Any, **__: Any) -> Mask:
        """Itself: what it captures lies where the model is."""
        return self

    def contiguous(self) -> Mask:
        """Itself."""
        return self

    def __repr__(self) -> str:
        return f"Mask({self.rule.name!r}, {list(self._size)})"

    __str__ = __repr__


def register() -> str:
    """Make flashgen known to transformers; returns its name, as in `from_pretrained(..., attn_implementation=name)`.

    The name is "fg_attention".  Served are forward and backward of decoders and encoders, padding on both sides,
    windows, chunks, prefixes and packed sequences, soft capping, learned sinks, dropout, and generate() with dynamic
    and static caches.  Position biases, paged caches and weights as an output raise LaunchError where a model asks for
    them.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    return NAME


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Mask:
    """The mask of a model's layers, as AttentionMaskInterface asks for it: where `mask_function` holds of the positions
    that offsets move, and the key is no padding of `attention_mask` ([batch, seen] in bool)."""
    size = batch_size, 1, q_length, kv_length
    rule, given = _shipped(mask_function, q_offset, kv_offset)
    if rule is not None and attention_mask is None:
        return Mask(rule, given, size)
    if rule is not None and isinstance(kv_offset, int) and kv_offset == 0:
        return Mask(_PADDED[rule.token], {**given, "padding": attention_mask}, size)
    traced = _apart if torch.compiler.is_compiling() else _traced
    rule = traced(q_offset, kv_offset, mask_function, attention_mask)
    return Mask(rule.bare, rule.given, size)


#: By how many positions the first query stands before the first key: less than lengths, so that sums fit an int.
_shift = param("shift", dtype=int, min=1 - MAX_LENGTH, max=MAX_LENGTH - 1)
_window = param("window", dtype=int, min=1, max=MAX_LENGTH - 1)

WINDOW = load_spec("sliding_window")
AROUND = variant(lambda b, h, q, k: (q - k <= _window) & (k - q <= _window), name="window_on_both_sides")

#: The same where the first query is not beside the first key, as behind a cache.
_SHIFTED = {
    CAUSAL.token: variant(lambda b, h, q, k: k <= q + _shift, name="causal_behind_cache"),
    WINDOW.token: variant(
        lambda b, h, q, k: (k <= q + _shift) & (q + _shift - k < _window), name="sliding_window_behind_cache"
    ),
}


def _cells(function: Any) -> dict[str, Any]:
    """What a function holds of where it was made, by name."""
    cells, code = getattr(function, "__closure__", None) or (), getattr(function, "__code__", None)
    return dict(zip(getattr(code, "co_freevars", ()), (cell.cell_contents for cell in cells), strict=False))


def _windowed(made: Any) -> tuple[Any, ...] | None:
    """The window of a mask function that is the meeting of one of transformers' overlays with a mask: the codes of both
    functions, the mask, and the window; None of any other function."""
    parts = _cells(made).get("mask_functions", ())
    if len(parts) != 2:
        return None
    overlay, beside = parts
    window = _cells(overlay).get("sliding_window")
    if type(window) is not int or not 0 < window < MAX_LENGTH:
        return None
    return getattr(made, "__code__", None), getattr(overlay, "__code__", None), beside, window


#: The shipped variants of what transformers makes of a window, by all of `_windowed` but the window.
_OF_WINDOWS = {
    found[:3]: rule
    for make, rule in (
        ("sliding_window_causal_mask_function", WINDOW),
        ("sliding_window_bidirectional_mask_function", AROUND),
    )
    if (found := _windowed(getattr(masking_utils, make, lambda _: None)(1))) is not None
}


def _shipped(mask_function: Any, q_offset: Any, kv_offset: Any) -> tuple[Variant | None, dict[str, Any]]:
    """The shipped variant of a mask that is one of them, and its parameters: no function is traced, and the kernel
    computes in 32 bits.  Full and causal ones are there where torch.compile traces a model."""
    if mask_function is masking_utils.bidirectional_mask_function:
        return FULL, {}
    if not isinstance(q_offset, int) or not isinstance(kv_offset, int):
        return None, {}
    rule, given, shift = None, {}, q_offset - kv_offset
    if mask_function is masking_utils.causal_mask_function:
        rule = CAUSAL
    elif not torch.compiler.is_compiling() and (found := _windowed(mask_function)) is not None:
        rule, given = _OF_WINDOWS.get(found[:3]), {"window": found[3]}
    if rule is None or shift == 0:
        return rule, given
    if torch.compiler.is_compiling() or abs(shift) >= MAX_LENGTH:
        return None, {}
    return _SHIFTED.get(rule.token), {**given, "shift": shift}


def _traced(q_offset: Any, kv_offset: Any, mask_function: Any, padding: torch.Tensor | None) -> Variant:
    # A static cache counts on in the tensor that it gives, before its layers are called.
    q_offset, kv_offset = (x.clone() if isinstance(x, torch.Tensor) else x for x in (q_offset, kv_offset))
    offsets = {"q_offset": q_offset, "kv_offset": kv_offset}
    numbers = tuple(name for name, offset in offsets.items() if isinstance(offset, int))
    moved = _moved(mask_function, q_offset, kv_offset)
    return from_flex(moved if padding is None else _padded(moved, padding, kv_offset), names=numbers)


_apart = torch.compiler.disable(_traced)


def _moved(mask_function: Any, q_offset: Any, kv_offset: Any) -> Callable[..., Any]:
    def moved(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return moved


def _padded(moved: Callable[..., Any], padding: torch.Tensor, kv_offset: Any) -> Callable[..., Any]:
    def padded(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place, seen = kv_idx + kv_offset, padding.shape[1]  # a static cache is longer than what was seen
        return moved(b, h, q_idx, kv_idx) & (place < seen) & padding[b, place.clamp(max=seen - 1)]

    return padded


def _with_softcap(rule: Variant) -> Variant:
    found = _capped.get(rule.token)
    if found is None:
        with _lock:
            found = _capped.setdefault(rule.token, rule & SOFTCAP)
    return found


#: Masks that users made themselves, without a softcap and with one, which comes before a mask that is added.
_GIVEN = {of: (rule, rule & SOFTCAP if rule.mask else SOFTCAP.then(rule)) for of, rule in MASKED.items()}

_padding = tensor("padding", ("batch", None), "bool")
_seen = _padding.size(1)  # a static cache is longer

PADDED = variant(lambda b, h, q, k: (k < _seen) & _padding[b, minimum(k, _seen - 1)], name="padded")

#: The shipped variants with padding, by their token.
_PADDED = {rule.token: rule & PADDED for rule in (FULL, CAUSAL, WINDOW, AROUND, *_SHIFTED.values())}

# torch.compile finds them made.
for _rule_of_models in (FULL, CAUSAL, *_PADDED.values()):
    _with_softcap(_rule_of_models)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as AttentionInterface asks for it: query [batch, heads, q_len, head_dim], key and value of fewer heads
    where they are shared, s_aux the learned sinks [heads]; returns [batch, q_len, heads, head_dim], and no weights."""
    for name, cure in _LACKS.items():
        if options.get(name) is not None and options[name] is not False:
            raise LaunchError(f"{NAME} takes no {name} of {type(module).__name__}\n  nearest: {cure}")
    float8.refuse_at(NAME, query=query, key=key, value=value)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
    rule, named = _rule(module, attention_mask, causal, softcap, key.shape[2])
    o = attention(query, key, value, rule, scale=scaling, dropout=dropout, sink=s_aux, **named)
    assert isinstance(o, torch.Tensor)  # no lse was asked for
    note(NAME)
    return o.transpose(1, 2).contiguous(), None


_LACKS = {
    "position_bias": "attn_implementation='sdpa', for a bias by position",
    "cache": "generate() with a dynamic or static cache, not a paged one",
    "output_attentions": "attn_implementation='eager', for the weights",
}


def _rule(
    module: torch.nn.Module, given: Any, causal: bool, softcap: float | None, kv_len: int
) -> tuple[Variant, Mapping[str, Any]]:
    """The variant of a layer's call, and its parameters and captured tensors."""
    cap = {} if softcap is None else {"softcap": softcap}
    if isinstance(given, Mask):
        return (given.rule, given.given) if softcap is None else (given.capped, {**given.given, **cap})
    if given is None:
        if causal:
            raise LaunchError(
                f"{type(module).__name__} is causal and got no mask: {NAME} reads it, and padding, from the mask that"
                " flashgen's own mask function makes\n"
                "  nearest: flashgen.integrations.transformers.register() before the model is called, or"
                " attn_implementation='sdpa' for a model that makes masks in another way"
            )
        return FULL if softcap is None else _with_softcap(FULL), cap
    if not isinstance(given, torch.Tensor) or given.dim() != 4 or given.dtype not in DTYPES:
        got = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise LaunchError(
            f"{type(module).__name__} got the attention mask {got}: it is [batch, heads, q_len, kv_len] of bool,"
            " float16, bfloat16 or float32, or what flashgen's own mask function makes"
        )
    of, read = kind(given[..., :kv_len])
    plain, capped = _GIVEN[of]
    return plain if softcap is None else capped, {"attn_mask": read, **cap}
