"""Kernels run in Triton's interpreter only if it is switched on before Triton is imported, so those tests have their own
process: `TRITON_INTERPRET=1 pytest tests/interpreter`. The sm_90a tests need the second environment of the Makefile."""
import os

collect_ignore = []
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("interpreter")
if not os.environ.get("GPTOSS_SM90A_PYTHON"):
    collect_ignore.append("sm90a")
