"""Kernels run in Triton's interpreter only if it is switched on before Triton is imported, so those tests have their
own process: `TRITON_INTERPRET=1 pytest tests/interpreter`."""
import gc
import os

collect_ignore = []
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("interpreter")


def pytest_collection_finish():
    """What the tests imported is no garbage: the collector need not look through all of it during every test."""
    gc.collect()
    gc.freeze()
