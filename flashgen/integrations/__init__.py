"""Other people's calls, served by flashgen: PyTorch's own and flex_attention, and models of transformers."""
