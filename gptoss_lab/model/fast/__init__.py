"""The fast forward: the plain model's arithmetic in fused kernels, over pages, with captured decode steps.

    weights.py      FastWeights: laid out once for the kernels, from a checkpoint or straight from random codes
    operations.py   which kernel runs what, and why
    step.py         what the layers of a prefill step share; decode.py: the same for decode, in fixed buffers
    forward.py      the layers
    ranks.py        the layers where several ranks hold the model; split.py: a prompt's tokens over the ranks
    own_rows.py     the layers of a long prompt whose rows are cut between the ranks
    graphs.py       decode steps captured at batch sizes, spare rows masked
    share.py        one rank's weights and model
    source.py       the same weights for the plain model, to compare with
    transformer.py  FastTransformer: what decoders, loop and server call; make_pool
"""
from gptoss_lab.model.fast.share import fast_share, lay_out_share
from gptoss_lab.model.fast.source import LaidOut
from gptoss_lab.model.fast.transformer import FastTransformer, make_pool
from gptoss_lab.model.fast.weights import FastWeights, lay_out

__all__ = [
    "FastTransformer", "FastWeights", "LaidOut", "fast_share", "lay_out", "lay_out_share", "make_pool",
]
