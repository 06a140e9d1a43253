"""Every test here runs kernels in Triton's interpreter, in a process that compiles nothing."""
from gptoss_lab.viz.interpreter import patch_once

patch_once()
