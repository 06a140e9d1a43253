"""Checkpoints: what must be in them, reading them, MXFP4 and FP8, converting, and making random ones."""
from gptoss_lab.checkpoint.convert import Conversion, convert
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.manifest import (
    TensorSpec,
    bytes_by_role,
    count_active,
    count_parameters,
    manifest,
    parameters_by_role,
    total_bytes,
)
from gptoss_lab.checkpoint.nano import ensure_nano
from gptoss_lab.checkpoint.reader import Checkpoint, open_checkpoint
from gptoss_lab.checkpoint.stored import Dense, Fp8, Mxfp4, Stored, split_gate_up
from gptoss_lab.checkpoint.synth import synth

__all__ = [
    "Checkpoint", "CheckpointError", "Conversion", "Dense", "Fp8", "Mxfp4", "Stored", "TensorSpec", "bytes_by_role",
    "convert", "count_active", "count_parameters", "ensure_nano", "manifest", "open_checkpoint", "parameters_by_role",
    "split_gate_up", "synth", "total_bytes",
]
