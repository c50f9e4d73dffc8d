"""A local layer of Gemma 2: a causal sliding window over soft-capped scores."""

from sliding_window import sliding_window
from softcap import softcap

local_softcap = sliding_window & softcap
