"""Training on packed documents: causal inside each document, with soft-capped scores."""

from causal import causal
from document import document
from softcap import softcap

packed_softcap = causal & document & softcap
