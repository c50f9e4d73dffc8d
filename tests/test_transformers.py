"""Models of transformers with flashgen's attention and masks, against their eager ones."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import flashgen
from flashgen.errors import LaunchError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils  # noqa: E402

from flashgen.frontends import flex  # noqa: E402
from flashgen.integrations import transformers as ours  # noqa: E402
from flashgen.integrations.transformers import NAME, SOFTCAP, Mask, attend, mask, register  # noqa: E402

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GROUPS = {**SIZES, "num_key_value_heads": 2}
WIDE = {**GROUPS, "head_dim": 16}
WINDOW = {"sliding_window": 4}
MODELS = {
    "Llama": GROUPS,
    "Mistral": GROUPS | WINDOW,
    "Qwen3": WIDE,
    "Gemma2": WIDE | WINDOW | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},
    "Gemma3": WIDE | WINDOW | {"query_pre_attn_scalar": 16},
    "GptOss": WIDE | WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 1},
}
CI = ["Llama", "GptOss"]
LENGTH = 11


def nightly(names):
    test = "test_forward_and_backward"
    return [name if name in CI else pytest.param(name, marks=pytest.mark.nightly(sibling=test)) for name in names]


@pytest.fixture(autouse=True, scope="module")
def registered():
    transformers.logging.set_verbosity_error()
    assert register() == NAME and "flash" not in NAME


def model_of(name):
    torch.manual_seed(0)
    config = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    kind = getattr(transformers, f"{name}ForCausalLM")
    return kind(getattr(transformers, config)(**MODELS[name])).eval()


def ids(batch=2):
    return torch.randint(3, 64, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def padding(side, batch=2):
    seen = torch.ones(batch, LENGTH, dtype=torch.long)
    if side == "left":
        seen[0, :3] = 0
    if side == "right":
        seen[0, -3:] = 0
    return seen


def both(model, call):
    """What a call gives with eager attention and with flashgen's."""
    results = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        model.zero_grad()
        results.append(call(model))
    assert flashgen.last_backend().call == NAME
    return results


def gradients(model, loss):
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare(model, inputs, seen):
    def call(model):
        logits = model(**inputs).logits[seen.bool()]
        return logits.detach(), *gradients(model, logits.square().mean())

    torch.testing.assert_close(*both(model, call), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", nightly(MODELS))
def test_forward_and_backward(name, side):
    seen = padding(side)
    compare(model_of(name), {"input_ids": ids(), **({"attention_mask": seen} if side else {})}, seen)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", nightly(MODELS))
def test_generate(name, cache):
    """Steps beyond the window, after padding on the left: one trace for all steps of a cache."""
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    model, before = model_of(name), flex.traces

    def generated(model):
        return model.generate(ids(), attention_mask=padding("left"), **options)

    assert torch.equal(*both(model, generated))
    kinds = 2 if "sliding_window" in MODELS[name] and name != "Mistral" else 1
    assert flex.traces - before <= 2 * kinds
    model.set_attn_implementation(NAME)
    now = flex.traces
    generated(model)
    assert flex.traces == now


def test_a_model_that_counts_the_dimensions_of_its_mask():
    """GPT-2 does, of the mask that generate() makes for a static cache."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    options = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True, "cache_implementation": "static"}

    def generated(model):
        return model.generate(ids(), attention_mask=padding("left"), pad_token_id=0, **options)

    assert torch.equal(*both(model, generated))


@pytest.mark.parametrize(
    ("asked", "use"),
    [
        ("size", lambda given: given.size()),
        ("dtype", lambda given: given.dtype),
        ("a part", lambda given: given[:, None]),
        ("add", lambda given: torch.add(torch.zeros(1), given)),
    ],
)
def test_a_mask_that_is_asked_for_what_tensors_have_says_who_asks(asked, use):
    given = mask(1, 3, 8)
    with pytest.raises(
        LaunchError, match=rf"^{asked} of attention_mask: this model computes(?s:.*)'eager', or 'sdpa' where"
    ):
        use(given)
    assert not hasattr(given, asked) and not hasattr(given, "__len__") and copy.deepcopy(given).shape == given.shape


def test_a_model_that_computes_attention_by_itself_is_refused():
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation=NAME).eval()
    with pytest.raises(LaunchError, match=r"this model computes attention by itself.*\n.*'eager', or 'sdpa' where"):
        model(ids())


@pytest.mark.nightly(sibling="test_a_compiled_model_without_padding")
def test_a_compiled_model_and_its_static_cache():
    model = model_of("Llama")
    model.set_attn_implementation(NAME)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    for n in (11, 9, 7, 5):
        given = {"input_ids": ids()[:, :n], "attention_mask": padding("left")[:, :n]}
        torch.testing.assert_close(compiled(**given).logits, model(**given).logits)
    assert counters["stats"]["unique_graphs"] <= 2
    options = {"attention_mask": padding("left"), "max_new_tokens": 6, "do_sample": False}
    steps = transformers.CompileConfig(backend="aot_eager", fullgraph=True)
    steps._compile_all_devices = True
    torch._dynamo.reset()
    found = model.generate(ids(), cache_implementation="static", compile_config=steps, **options)
    assert torch.equal(found, model.generate(ids(), **options))


@pytest.mark.slow
def test_a_compiled_model_without_padding():
    model = model_of("Llama")
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    try:
        found = compiled(ids()).logits
    except torch._dynamo.exc.Unsupported as error:
        if "co_varnames" in str(error):
            pytest.skip("this PyTorch's compiler does not know what transformers' models are made of")
        raise
    torch.testing.assert_close(found, model(ids()).logits)


@pytest.mark.nightly(sibling="test_forward_and_backward")
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_an_encoder(side):
    sizes = SIZES | {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
    torch.manual_seed(0)
    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes)).eval()
    seen = padding(side)
    compare(model, {"input_ids": ids(), **({"attention_mask": seen} if side else {})}, seen)


@pytest.mark.nightly(sibling="test_forward_and_backward")
def test_a_prefix_that_sees_itself():
    """PaliGemma: an image and a prefix in both directions, then text."""
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**vision, image_size=8, patch_size=4, projection_dim=32),
        text_config=transformers.GemmaConfig(**WIDE),
        image_token_index=63,
        projection_dim=32,
        hidden_size=32,
        vocab_size=64,
    )
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    tokens = ids(1).clamp(max=62)
    tokens[0, :4] = 63
    kinds = (torch.arange(LENGTH) >= 7).long()[None]
    inputs = {"input_ids": tokens, "pixel_values": torch.randn(1, 3, 8, 8), "attention_mask": padding(None, 1)}
    inputs |= {"token_type_ids": kinds, "labels": tokens}
    torch.testing.assert_close(*both(model, lambda model: model(**inputs).logits.detach()), rtol=1e-4, atol=1e-6)


def test_packed_sequences():
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)
    compare(model_of("Llama"), {"input_ids": ids(), "position_ids": places}, padding(None))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_that_a_user_made(kind):
    seen = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.4
    seen = (seen | torch.eye(LENGTH, dtype=torch.bool)).tril()
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    model = model_of("Llama")
    model.set_attn_implementation("eager")
    want = model(ids(), attention_mask=added).logits
    model.set_attn_implementation(NAME)
    found = model(ids(), attention_mask=seen if kind is torch.bool else added).logits
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)


def test_dropout_and_checkpoints():
    model = model_of("Llama").train()
    model.set_attn_implementation(NAME)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    found = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(4)
        found.append(gradients(model, model(ids(), use_cache=False).logits.square().mean()))
    torch.testing.assert_close(*found)
    torch.manual_seed(5)
    assert not torch.equal(model(ids()).logits, model.eval()(ids()).logits)


class Layer(torch.nn.Module):
    is_causal = True


def tensors(q_len=3, kv_len=8):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 16, generator=random) for n in (q_len, kv_len, kv_len)]


def test_a_causal_layer_without_flashgen_s_mask_raises():
    q, k, v = tensors()
    with pytest.raises(LaunchError, match=r"^Layer is causal and got no mask: fg_attention(?s:.*)register\(\)"):
        attend(Layer(), q, k, v, None)
    with pytest.raises(LaunchError, match=r"Layer got the attention mask \[2, 8\]: it is \[batch, heads, q_len"):
        attend(Layer(), q, k, v, torch.ones(2, 8))
    o, weights = attend(Layer(), q, k, v, None, is_causal=False)
    assert o.shape == (2, 3, 2, 16) and weights is None


@pytest.mark.parametrize("name", ["position_bias", "cache", "output_attentions"])
def test_what_it_lacks_is_refused_by_name(name):
    q, k, v = tensors()
    with pytest.raises(LaunchError, match=f"^fg_attention takes no {name} of Layer\n  nearest: "):
        attend(Layer(), q, k, v, None, is_causal=False, **{name: True})
    attend(Layer(), q, k, v, None, is_causal=False, **{name: None if name != "output_attentions" else False})
    with pytest.raises(LaunchError, match=r"^fg_attention: key is float8_e4m3fn, and this call takes no descales"):
        attend(Layer(), q, k.to(torch.float8_e4m3fn), v, None, is_causal=False)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("given", ["flashgen's", "bool", "float", None])
def test_softcap_comes_before_the_mask(softcap, given):
    q, k, v = tensors(8, 8)
    lower = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    added = torch.randn(1, 1, 8, 8)
    scores = q @ k.mT * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    masks = {"flashgen's": mask(2, 8, 8), "bool": lower, "float": added, None: None}
    scores = scores + added if given == "float" else scores if given is None else scores.masked_fill(~lower, -torch.inf)
    o, _ = attend(Layer(), q, k, v, masks[given], scaling=0.3, softcap=softcap, is_causal=False)
    torch.testing.assert_close(o, (scores.softmax(-1) @ v).transpose(1, 2))


def test_a_position_that_the_device_counts_is_read_when_the_kernel_runs():
    """A static cache's tensor is copied, as the cache counts on before its layers are called; nobody reads it here."""
    q, k, v = tensors()
    at = torch.tensor(2)
    found = mask(2, 3, 8, q_offset=at, attention_mask=torch.ones(2, 5, dtype=torch.bool))
    at.add_(3)
    assert isinstance(found, Mask) and found.shape == (2, 1, 3, 8) and found.contiguous() is found.to("cpu") is found
    o, _ = attend(Layer(), q, k, v, found)
    seen = torch.ones(3, 8, dtype=torch.bool).tril(2) & (torch.arange(8) < 5)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
    torch.testing.assert_close(o, right.transpose(1, 2))


def test_masks_of_one_kind_are_one_variant():
    before = flex.traces
    seen = torch.ones(2, 9, dtype=torch.bool)
    made = [mask(2, 1, 9 + i, q_offset=8 + i, attention_mask=seen) for i in range(5)]
    assert len({x.rule.token for x in made}) == 1 and flex.traces - before <= 1
    assert made[0].capped == made[0].rule & SOFTCAP


def seen(mask, q_len, kv_len):
    """Which keys each query sees, by attention: of equal scores each takes its share of an identity."""
    q, k = torch.zeros(1, 1, q_len, 16), torch.zeros(1, 1, kv_len, 16)
    shares = flashgen.attention(q, k, torch.eye(kv_len)[None, None], mask.rule, **mask.given)
    return shares[0, 0] > 0


FUNCTIONS = {
    "causal": (masking_utils.causal_mask_function, "causal"),
    "window": (masking_utils.sliding_window_causal_mask_function(5), "sliding_window"),
    "both sides": (masking_utils.sliding_window_bidirectional_mask_function(3), "window_on_both_sides"),
}


@pytest.mark.parametrize("offsets", [(0, 0), (7, 7), (9, 0), (9, 4)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_of_transformers_are_shipped_variants(name, offsets, monkeypatch):
    """No function is traced, but for a window on both sides behind a cache, and they hide what the functions do."""
    function, shipped = FUNCTIONS[name]
    q_offset, kv_offset = offsets
    traced, real = [], ours._traced
    monkeypatch.setattr(ours, "_traced", lambda *given: traced.append(given) or real(*given))
    mask = ours.mask(1, 6, 13, q_offset, kv_offset, function)
    at_q, at_k = torch.arange(6)[:, None] + q_offset, torch.arange(13)[None] + kv_offset
    assert torch.equal(seen(mask, 6, 13), function(0, 0, at_q, at_k).expand(6, 13))
    shifted = q_offset != kv_offset
    assert len(traced) == (shifted and name == "both sides")
    assert traced or mask.rule.name == shipped + "_behind_cache" * shifted
    padded = ours.mask(1, 6, 13, q_offset, kv_offset, function, torch.arange(13)[None] % 3 > 0)
    if kv_offset == 0:
        assert torch.equal(seen(padded, 6, 13), seen(mask, 6, 13) & (torch.arange(13) % 3 > 0))


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.or_masks(masking_utils.sliding_window_overlay(3), masking_utils.causal_mask_function),
        masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(3)),
        masking_utils.and_masks(masking_utils.sliding_window_overlay(3), masking_utils.bidirectional_mask_function),
        masking_utils.sliding_window_causal_mask_function(0),
        masking_utils.sliding_window_causal_mask_function(1 << 24),
        masking_utils.sliding_window_overlay(3),
    ],
)
def test_masks_that_resemble_shipped_ones_are_traced(function):
    mask = ours.mask(1, 6, 13, 2, 2, function)
    assert mask.rule.name not in {shipped for _, shipped in FUNCTIONS.values()}
    at_q, at_k = torch.arange(6)[:, None] + 2, torch.arange(13)[None] + 2
    assert torch.equal(seen(mask, 6, 13), function(0, 0, at_q, at_k).expand(6, 13))


def test_layers_share_what_a_mask_was_bound_to():
    """Nothing is merged or made for each layer."""
    mask = ours.mask(1, 6, 13, 0, 0, masking_utils.sliding_window_causal_mask_function(5))
    rule, named = ours._rule(torch.nn.Identity(), mask, True, None, 13)
    assert rule is mask.rule and named is mask.given
