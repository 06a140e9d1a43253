"""Own CUDA kernels for Hopper, compiled at first use with NVRTC (torch brings it) or nvcc, and cached on disk."""
