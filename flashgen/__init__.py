"""flashgen: a compiler for attention.  Describe a variant in a few lines of Python, get readable CUDA.

Everything is imported when first used, so that `import flashgen` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module

__version__ = "0.1.0"

#: Public name -> the module that holds it, and its name there.
_EXPORTS = {
    "FlashgenError": ("flashgen.errors", "FlashgenError"),
    "SpecError": ("flashgen.errors", "SpecError"),
    "PlanError": ("flashgen.errors", "PlanError"),
    "CompileError": ("flashgen.errors", "CompileError"),
    "LaunchError": ("flashgen.errors", "LaunchError"),
    "CapturedIndexError": ("flashgen.errors", "CapturedIndexError"),
    "Variant": ("flashgen.lang.variant", "Variant"),
    "variant": ("flashgen.lang.variant", "variant"),
    "load_spec": ("flashgen.lang.load", "load_spec"),
    "attention": ("flashgen.ops.attention", "attention"),
    "attention_varlen": ("flashgen.ops.attention", "attention_varlen"),
    "scaled_dot_product_attention": ("flashgen.integrations.sdpa", "scaled_dot_product_attention"),
    **{name: ("flashgen.integrations.activation", name) for name in ("activate", "deactivate")},
    "last_backend": ("flashgen.integrations.backends", "last_backend"),
    "from_flex": ("flashgen.frontends.flex", "from_flex"),
    "flex_attention": ("flashgen.integrations.flex_attention", "flex_attention"),
    "merge": ("flashgen.ops.merge", "merge"),
    "quantize": ("flashgen.ops.quantize", "quantize"),
    "supports": ("flashgen.ops.supports", "supports"),
    "plan": ("flashgen.ops.stages", "plan"),
    "emit": ("flashgen.ops.stages", "emit"),
    "compile": ("flashgen.ops.stages", "compile"),
    **{name: ("flashgen.lang.declare", name) for name in ("param", "constant", "tensor")},
    "sink": ("flashgen.lang.sink", "sink"),
    "abs": ("flashgen.lang.functions", "absolute"),
    **{
        name: ("flashgen.lang.functions", name)
        for name in (
            *("batch", "heads", "kv_heads", "q_len", "kv_len"),
            *("where", "minimum", "maximum", "clamp"),
            *("exp", "exp2", "log", "log2", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt", "floor"),
            *("pow", "sin", "cos", "erf", "any", "sum"),
            *("int32", "int64", "float32"),
        )
    },
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        from difflib import get_close_matches

        close = get_close_matches(name, __all__, n=1)
        hint = f" (did you mean fg.{close[0]}?)" if close and not name.startswith("_") else ""
        raise AttributeError(f"flashgen has no {name!r}{hint}", name=name, obj=sys.modules[__name__])
    module, attribute = _EXPORTS[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
