"""Other people's calls, served by flashgen: PyTorch's scaled_dot_product_attention, and models of transformers."""
