"""Compute with a model: weights, a decoder, its cache, sampling; in plain PyTorch.

In: token ids. Out: log-probabilities and sampled ids. Read `sampling.py` first: the choice of a
token and its log-probability. `decoder.py` is the network, `kv_cache.py` what it keeps of a
conversation, and `sampler.py` plays many episodes at once. `policies.py` has two more policies,
`files.py` reads and writes Hugging Face folders, `cpu_products.py` and `rope_scaling.py` are parts
of the decoder.
"""
