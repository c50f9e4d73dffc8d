"""score_mods as people give them to PyTorch's flex_attention: factories by name, as a training loop would have them."""

import math

import torch
import torch.nn.functional as F
from flex_inputs import BATCH, HEADS, LENGTH, random
from torch import nn

SCORES = {}


def score(factory):
    SCORES[factory.__name__] = factory
    return factory


@score
def identity():
    return lambda score, b, h, q, k: score


@score
def doubled():
    return lambda score, b, h, q, k: score * 2


@score
def squared():
    return lambda score, b, h, q, k: score.square() - score**3 / 9 + torch.pow(score, 2)


@score
def causal_score():
    def mod(score, b, h, q, k):
        return torch.where(q >= k, score, -float("inf"))

    return mod


@score
def causal_filled():
    return lambda score, b, h, q, k: score.masked_fill(q < k, float("-inf"))


@score
def relative():
    return lambda score, b, h, q, k: score + (k - q) / 16


@score
def alibi():
    def mod(score, b, h, q, k):
        slope = torch.exp2(-((h + 1) * 8.0 / HEADS))
        return score + (k - q) * slope

    return mod


@score
def alibi_slopes():
    slopes = torch.tensor([0.5, 0.0625])
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


@score
def alibi_learned():
    slopes = nn.Parameter(torch.tensor([0.3, 0.1]))
    return lambda score, b, h, q, k: score - slopes[h].exp() * torch.abs(q - k) * 0.1


@score
def softcap():
    cap = 3.0

    def mod(score, b, h, q, k):
        return cap * torch.tanh(score / cap)

    return mod


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.ops.aten.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)

    @staticmethod
    def vmap(info, in_dims, x):
        return _Tanh.apply(x), in_dims[0]


@score
def softcap_function():
    tanh = _Tanh.apply
    return lambda score, b, h, q, k: 2 * tanh(score / 2)


@score
def relative_bias():
    bias = random(HEADS, 2 * LENGTH, grad=True)
    return lambda score, b, h, q, k: score + bias[h, q - k + LENGTH]


@score
def relative_bias_wrapped():
    bias = random(2 * LENGTH, seed=1, grad=True)
    return lambda score, b, h, q, k: score + bias[q - k]


@score
def full_bias():
    bias = random(1, HEADS, LENGTH, LENGTH, seed=2, grad=True)
    return lambda score, b, h, q, k: score + bias[0, h, q, k]


@score
def bias_of_half():
    bias = random(BATCH, LENGTH, seed=3, dtype=torch.bfloat16)
    return lambda score, b, h, q, k: score + bias[b, k].float()


@score
def buckets():
    table = nn.Embedding(8, HEADS)
    nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(4))

    def mod(score, b, h, q, k):
        distance = (q - k).clamp(min=0)
        far = 4 + (torch.log(distance.float() / 4 + 1e-6) / math.log(16) * 4).long()
        bucket = torch.where(distance < 4, distance, torch.clamp(far, max=7))
        return score + table.weight[bucket, h]

    return mod


@score
def modules():
    table, cap = nn.Embedding(10, HEADS), nn.Softplus(beta=2.0)
    nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(5))
    # torch's own mapping has no gradient of rows: this is of a number.
    column = nn.Embedding.from_pretrained(table.weight[:, :1].detach())
    return lambda score, b, h, q, k: cap(score) + column((q - k).abs().clamp(max=9)).sum()


@score
def gated():
    gate, shift = random(HEADS, seed=5, grad=True), torch.tensor(0.25, requires_grad=True)
    return lambda score, b, h, q, k: score * torch.sigmoid(gate[h]) + shift


@score
def gate_of_view():
    weights = nn.Parameter(random(2, HEADS, seed=6).detach())
    first = weights[0]
    return lambda score, b, h, q, k: score * first[h]


@score
def head_constant():
    weights = random(4, seed=7, grad=True)
    return lambda score, b, h, q, k: score + weights[2] * (k % 2) - weights[-1] * (q == k)


@score
def rotary_dot():
    of_q, of_k = random(BATCH, HEADS, LENGTH, 12, seed=8, grad=True), random(BATCH, 1, LENGTH, 12, seed=9, grad=True)

    def mod(score, b, h, q, k):
        return score + 0.2 * torch.dot(of_q[b, h, q], of_k[b, h // HEADS, k])

    # torch's own mapping has no gradient of rows.
    mod.written_out = lambda scores: scores + 0.2 * (of_q @ of_k.transpose(-1, -2)).double()
    return mod


@score
def product_of_rows():
    of_q, of_k = random(LENGTH, 4, seed=10, grad=True), random(LENGTH, 4, seed=11)

    def mod(score, b, h, q, k):
        return score + (of_q[q] * of_k[k]).sum(-1) / 4 - (of_q[q] @ of_k[q]) / 8

    own = (of_q * of_k).sum(-1, keepdim=True)
    mod.written_out = lambda scores: scores + (of_q @ of_k.T / 4 - own / 8).double()
    return mod


@score
def activations():
    def mod(score, b, h, q, k):
        x = F.relu(score) + F.silu(score * 0.5) + F.gelu(score) - torch.relu(-score)
        return x + F.gelu(score, approximate="tanh") + F.softplus(score) + F.leaky_relu(score, 0.2)

    return mod


@score
def rectified_at_the_edge():
    weights = torch.zeros(HEADS, requires_grad=True)

    def mod(score, b, h, q, k):
        return score + F.relu(weights[h]) * (k / 50) + weights[h].clamp(min=0) * (q * k / 900) + weights[h].abs() * k

    return mod


@score
def functions():
    def mod(score, b, h, q, k):
        x = torch.exp(score.clamp(max=1)) + torch.log1p(score.abs()) + torch.log(score * score + 1)
        x = x + torch.expm1(score.clamp(max=1))
        return (
            x + torch.rsqrt(1 + score**2) + torch.sqrt(score.abs() + 1) + torch.erf(score) + torch.log2(1 + score.exp())
        )

    return mod


@score
def trigonometry():
    return lambda score, b, h, q, k: torch.sin(torch.cos(score)) + torch.tan(b / 4) + score


@score
def rounding():
    def mod(score, b, h, q, k):
        steps = torch.floor(q / 7) + torch.ceil(k / 5) + torch.round(q / 2) + torch.trunc((q - k) / 3)
        return score + steps / 50

    return mod


@score
def temperature_by_length():
    return lambda score, b, h, q, k: score * torch.log(q.to(torch.float32) + 2)


@score
def clipped():
    return lambda score, b, h, q, k: torch.clamp(score, -1.0, 1.5).clamp_max(1.25) + score.clip(min=0)


@score
def clipped_by_tensors():
    low, high = torch.tensor(-0.5), random(HEADS, seed=12).abs()
    return lambda score, b, h, q, k: torch.max(torch.min(score, high[h]), low)


@score
def two_scales():
    near, far = torch.tensor([1.5, 0.5]), torch.tensor([0.1, 0.2])

    def mod(score, b, h, q, k):
        return score * torch.where(abs(q - k) < 16, near[h], far[h])

    return mod


@score
def conditions_added():
    return lambda score, b, h, q, k: score + (q >= k) - 2.0 * (k == 0) + (q == k).float()


@score
def decay():
    rate = torch.tensor([0.9, 0.99])
    return lambda score, b, h, q, k: score + torch.log(rate[h]) * (q - k).abs() + torch.log(rate)[h]


@score
def wrapped_score():
    def inner(score, b, h, q, k):
        return score + k / 10

    lengths = torch.tensor([140, 80])

    def mod(score, b, h, q, k):
        return torch.where(k < lengths[b], inner(score, b, h, q, k), float("-inf"))

    return mod


@score
def reciprocal():
    return lambda score, b, h, q, k: score / (1 + (q - k).abs()) + torch.reciprocal(k + 1.0) - 1 / (q + 1)


@score
def largest_of_row():
    marks = random(LENGTH, 5, seed=13)
    return lambda score, b, h, q, k: score + marks[q].amax(-1) - torch.max(marks[k]) + marks[k].mean() + marks[q].min()


@score
def stacked():
    return lambda score, b, h, q, k: torch.stack([score, score * 0.5, score - 1]).sum(0) / 2


@score
def signs():
    return lambda score, b, h, q, k: score + torch.sign(q - k) * 0.5 + torch.sigmoid(score) * (h - 0.5).sign()


@score
def powers():
    return lambda score, b, h, q, k: score + 0.5 ** (h + 1) + torch.pow(score.abs() + 0.5, 1.5) - (k + 1) ** -0.5


@score
def float_powers():
    """Of whole numbers, to which torch.pow has no negative power, and conditions."""
    table = torch.arange(1, LENGTH + 1)

    def mod(score, b, h, q, k):
        made = torch.float_power(q + 1, -2) + torch.float_power(table[k], -1) + torch.float_power(2, k - q - LENGTH)
        return score + made.float() + torch.float_power(k < q, 2).float()

    return mod


@score
def made_in_place_of():
    def mod(score, b, h, q, k):
        none = torch.tensor(-1e4, dtype=score.dtype, device=score.device)
        keep = torch.zeros_like(score)
        return torch.where(k <= q, score + keep, none) + score.new_tensor(1.0) + torch.full((), 0.5)

    return mod


@score
def rows_of_weights():
    weights = random(3, LENGTH, seed=14, grad=True)

    def mod(score, b, h, q, k):
        for level, width in enumerate((4, 16, 64)):
            score = score + weights[level][q // width]
        return score

    return mod


@score
def products_of_captured():
    left, right = random(LENGTH, seed=15, grad=True), random(LENGTH, seed=16, grad=True)
    return lambda score, b, h, q, k: score + left[q] * right[k]


@score
def scaled_table():
    table = random(HEADS, LENGTH, seed=17, grad=True)
    return lambda score, b, h, q, k: score + (table * 0.5 + 1)[h, k]


@score
def ends_of_hardtanh():
    """At the ends the gradient is 0."""
    bias = torch.tensor([-1.0, 0.25, 1.0, 6.0, 7.0], requires_grad=True)
    relu6, hardtanh, log_sigmoid = nn.functional.relu6, nn.functional.hardtanh, nn.functional.logsigmoid
    return lambda score, b, h, q, k: (
        score + hardtanh(bias[k % 5]) + relu6(bias[q % 5]) * 0.5 + log_sigmoid(score + bias[h])
    )
