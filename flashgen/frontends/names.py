"""torch's names of functions: those that are others of the table under another name, and what to write instead of those
that it has not."""

from __future__ import annotations

#: torch's names of functions that the table of operations has under another, and of Python's operators.
ALIASES: dict[str, str] = {
    **{"truediv": "div", "divide": "div", "true_divide": "div", "floordiv": "floor_divide", "mod": "remainder"},
    **{"subtract": "sub", "multiply": "mul", "negative": "neg", "positive": "pos", "absolute": "abs"},
    **{"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"},
    **{"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "invert"},
    **{"bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift", "power": "pow"},
    **{"clip": "clamp", "fix": "trunc", "sgn": "sign", "special_erf": "erf"},
    **{
        "expit": "sigmoid",
        "reshape": "view",
        "permute_dims": "permute",
        "swapaxes": "transpose",
        "as_tensor": "tensor",
    },
    "log_sigmoid": "logsigmoid",
    **{"scalar_tensor": "tensor", "reshape_as": "view_as", "asarray": "tensor"},
    **{"special_expit": "sigmoid", "special_exp2": "exp2", "special_log1p": "log1p", "bfloat16": "half"},
    **{"short": "half", "double": "half", "char": "half", "byte": "half"},
}

#: What to write instead of what is not in the table.
CURES: dict[str, str] = {
    **dict.fromkeys(
        (
            "item",
            "tolist",
            "numpy",
            "cpu",
            "cuda",
            "float_",
            "__float__",
            "__int__",
            "__bool__",
            "__index__",
            "is_nonzero",
        ),
        "it needs a value, and tensors are read when the kernel runs: index the tensor, and work on what that gives",
    ),
    **dict.fromkeys(("detach", "data", "requires_grad_"), "detach the tensor before the function captures it"),
    "cond": "write torch.where(condition, x, y)",
    "while_loop": "write a loop of a number of rounds that Python knows, and torch.where(condition, x, y) in it",
    "hypot": "write torch.sqrt(x * x + y * y)",
    **dict.fromkeys(
        ("cumsum", "cumprod", "sort", "argsort", "topk", "unique", "nonzero", "argmax", "argmin", "softmax", "median"),
        "compute it before, and capture the result",
    ),
    **dict.fromkeys(
        (
            "rand",
            "randn",
            "randint",
            "rand_like",
            "randn_like",
            "bernoulli",
            "normal",
            "dropout",
            "empty",
            "empty_like",
        ),
        "draw before, and capture the result; flashgen.attention(dropout=) drops probabilities",
    ),
    **dict.fromkeys(("einsum", "mm", "bmm", "addmm"), "write (x * y).sum(-1), or torch.dot"),
    "half": "it would round to a type that arithmetic here does not have: .float() is float32",
    "setitem": "a mask or score changes no tensor: write torch.where(condition, new, old)",
    "divmod": "write x // y and x % y",
}
