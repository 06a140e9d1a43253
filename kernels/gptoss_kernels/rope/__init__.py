"""Rotary positions fused with the split of QKV and the write into the cache."""
from gptoss_kernels.rope.cache import rope_cache_triton

__all__ = ["rope_cache_triton"]
