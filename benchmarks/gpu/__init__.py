"""What one lent GPU can tell in 30 minutes, without network, Ray and vLLM: `first_half_hour.sh` runs it."""
