"""The plain torch form of every kernel: the one oracle that all tests compare with.

Each function is written for reading, runs on any device and in fp32 or fp64, and takes no shortcut that a kernel
would take. Speed is not a goal; the functions in `norm`, `rope` and `moe` are nevertheless what the model runs where
there is no GPU, so they avoid waste that would make a small model slow.
"""
