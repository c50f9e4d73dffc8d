"""Models of transformers with random weights, 24 layers of them: a training step and a prefill, by who attends.

They are long enough that the GPU is the limit: of short ones the time is that of transformers' own Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashgen.bench.suite import Contest, Ground, Row, Suite
from flashgen.bench.timers import Eager

if TYPE_CHECKING:
    import torch

#: Who attends, by the name of a peer: attn_implementation of transformers.
IMPLEMENTATIONS = {"sdpa": "sdpa", "fa2": "flash_attention_2", "flex": "flex_attention"}

#: Tokens of a sequence.
LENGTH = 16_384

#: Sequences by what is timed.  A step of one takes about 45 GB in bfloat16: 24 layers keep 70 KB of a token each, and
#: the loss, in float32 of 32,000 words, 10 GB beside them.
BATCH = {"prefill": 2, "training": 1}

#: Sizes of about half a billion weights.
SIZES = {
    **{"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    **{"num_attention_heads": 16, "num_key_value_heads": 8},
    **{"max_position_embeddings": LENGTH, "tie_word_embeddings": True},
}

#: How far logits, and gradients of a weight, may lie from those of the reference: what 24 layers make of roundings in
#: 16 bits.
SAME = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A causal model by its family, what its configuration says beside the sizes, and the shape of its tokens.

    peers      who else attends, of IMPLEMENTATIONS: those that compute the same
    reference  attn_implementation of the model that results are compared with
    """

    family: str
    batch: int
    length: int
    options: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, object] = field(default_factory=lambda: SIZES)
    peers: tuple[str, ...] = tuple(IMPLEMENTATIONS)
    reference: str = "sdpa"

    def made(self, implementation: str, ground: Ground) -> torch.nn.Module:
        """The model with the seed's weights, in bfloat16."""
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(ground.seed)
        config = getattr(transformers, f"{self.family}Config")(**self.sizes, **self.options)
        config._attn_implementation = implementation
        with torch.device(ground.device):
            return getattr(transformers, f"{self.family}ForCausalLM")(config).to(torch.bfloat16)

    def tokens(self, ground: Ground) -> torch.Tensor:
        import torch

        generator = torch.Generator(ground.device).manual_seed(ground.seed)
        shape = (self.batch, self.length)
        return torch.randint(int(self.sizes["vocab_size"]), shape, device=ground.device, generator=generator)


def prefill(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Logits of a prompt's last token."""
    import torch

    model.eval()

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, use_cache=False, logits_to_keep=1).logits

    return run


def training(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Forward and backward of the loss; gives the gradient of the last layer's first weight."""
    model.train()
    weight = next(model.model.layers[-1].parameters())

    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        return weight.grad

    return run


def contest(of: Model, make: Callable[..., Callable[[], torch.Tensor]], ground: Ground) -> Contest:
    """flashgen's attention beside others' in the same model."""
    import torch

    from flashgen.integrations.transformers import register

    torch._dynamo.reset()  # after a few masks it would no longer compile flex_attention, and run it unfused
    tokens, name = of.tokens(ground), register()

    def with_attention(implementation: str) -> Callable[[], torch.Tensor]:
        return make(of.made(implementation, ground), tokens)

    run = with_attention(name)
    right = functools.cache(lambda: with_attention(of.reference)())

    def wrong(who: str, found: torch.Tensor) -> list[str]:
        error = float((found.float() - right().float()).norm() / right().float().norm())
        return [] if error <= SAME else [f"{who}: it differs from {of.reference} by {error:.3g}"]

    names = [peer for peer in ground.names if peer in of.peers]
    peers = {peer: functools.partial(with_attention, IMPLEMENTATIONS[peer]) for peer in names}
    return Contest(forms={"flashgen": run}, peers=peers, wrong=wrong, about={"family": of.family, **of.options})


def _models(batch: int) -> list[tuple[str, Model, dict[str, float]]]:
    """What each is called, and how many times faster than others it must be."""
    window, gemma = {"sliding_window": 4096}, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256}
    of = functools.partial(Model, batch=batch, length=LENGTH)
    capped = of(
        family="Gemma2",
        options=window,
        sizes={**SIZES, **gemma},
        peers=("fa2", "flex"),  # sdpa caps no score
        reference=IMPLEMENTATIONS["flex"],
    )
    return [
        ("causal", of(family="Llama", peers=("sdpa", "fa2")), {"sdpa": 1.0, "fa2": 1.0}),
        ("window 4096", of(family="Mistral", options=window, peers=("fa2", "flex")), {"flex": 1.3}),
        ("softcap, every other window 4096", capped, {"flex": 1.3}),
    ]


def _rows(_: bool = False) -> list[Row]:
    return [
        Row(
            part=make.__name__,
            name=f"{of.family} {mask} b{of.batch} s{of.length}",
            make=functools.partial(contest, of, make),
            timer=Eager(slot_ms=200.0),
            bars=bars,
        )
        for make in (prefill, training)
        for mask, of, bars in _models(BATCH[make.__name__])
    ]


SUITE = Suite(
    name="models",
    doc="models of transformers of 24 layers with random weights: a prefill and a training step",
    rows=_rows,
    peers=tuple(IMPLEMENTATIONS),
    minutes=8,
)
