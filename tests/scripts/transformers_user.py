"""A Llama that reads a padded batch and goes on writing, by transformers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(1, 50, (2, 9))
    seen = torch.ones_like(tokens)
    tokens[0, :4], seen[0, :4] = 0, 0
    logits = model(tokens, attention_mask=seen, labels=tokens).logits
    written = model.generate(tokens, attention_mask=seen, max_new_tokens=3, do_sample=False)
    return torch.cat([logits[:, -1].flatten(), written.flatten().float()]).detach()
