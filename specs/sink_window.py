"""Causal sliding window that also keeps the first keys, the attention sinks of StreamingLLM."""

import flashgen as fg

window = fg.param("window", default=1024, min=1)
sinks = fg.param("sinks", default=4, min=0)


@fg.variant
def sink_window(b, h, q, k):
    return (k <= q) & ((q - k < window) | (k < sinks))
