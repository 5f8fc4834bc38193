"""Measure one GPU in 30 minutes, without network, Ray and vLLM: `first_half_hour.sh`."""
