"""Scripts as people have them run on flashgen with an import and a call changed, and find what they found before."""

import sys
import types
from pathlib import Path

import pytest
import torch

from flashgen.integrations import flex_attention as flex
from flashgen.integrations import sdpa, transformers

SCRIPTS = Path(__file__).parent / "scripts"

#: For each script the lines that change, as they are and as they become; and what then calls flashgen's attention.
CHANGES = {
    "flex_user": (
        {
            "from torch.nn.attention.flex_attention import create_block_mask, flex_attention": (
                "from torch.nn.attention.flex_attention import create_block_mask; from flashgen import flex_attention"
            ),
        },
        flex,
    ),
    "transformers_user": (
        {
            "import torch": "import torch; from flashgen.integrations.transformers import register",
            '    config._attn_implementation = "sdpa"': "    config._attn_implementation = register()",
        },
        transformers,
    ),
    "sdpa_user": (
        {
            "import torch": "import torch; import flashgen",
            "        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)": (
                "        o = flashgen.scaled_dot_product_attention(q, k, v, is_causal=True)"
            ),
        },
        sdpa,
    ),
}


def result(text, name, monkeypatch):
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)  # where torch looks a function's module up
    exec(compile(text, str(SCRIPTS / f"{name}.py"), "exec"), module.__dict__)
    return module.main()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", CHANGES)
def test_a_script_with_an_import_and_a_call_changed(name, monkeypatch):
    changes, caller = CHANGES[name]
    text = (SCRIPTS / f"{name}.py").read_text()
    lines = text.splitlines()
    assert len(changes) <= 2 and all(lines.count(old) == 1 for old in changes)
    calls = []
    attention = caller.attention
    monkeypatch.setattr(caller, "attention", lambda *given, **named: calls.append(1) or attention(*given, **named))
    before = result(text, name, monkeypatch)
    assert not calls and before.isfinite().all() and before.std() > 0
    after = result("\n".join(changes.get(line, line) for line in lines), name, monkeypatch)
    assert calls
    torch.testing.assert_close(after, before, rtol=2e-4, atol=2e-5)


def test_the_model_of_characters_learns(monkeypatch):
    losses = result((SCRIPTS / "sdpa_user.py").read_text(), "sdpa_user", monkeypatch)
    assert losses[-1] < 0.8 * losses[0]
