"""macOS and Windows have no Triton: plain arithmetic must still import, and a choice must say what is missing."""
import subprocess
import sys

HIDE = """
import importlib.abc, importlib.util, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.startswith("triton") else found(name, package)
sys.meta_path.insert(0, Hidden())
"""


def _run(code):
    return subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True, timeout=120)


def test_the_arithmetic_imports_and_the_kernels_are_absent():
    done = _run("import gptoss_kernels.moe as moe, gptoss_kernels.moe.study, gptoss_kernels.attention\n"
                "print(hasattr(moe, 'group_layout'), hasattr(moe, 'route'))")
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_an_attention_that_needs_triton_says_so():
    done = _run("from gptoss_kernels.attention import LayerKind, Prefill\n"
                "plan = Prefill(LayerKind(4, 2, 16), [0, 3], device='cpu')\n"
                "print(plan.choice.backend)\n"
                "Prefill(LayerKind(4, 2, 16), [0, 3], device='cpu', backend='triton')")
    assert done.stdout.split() == ["reference"]
    assert "BackendUnavailable" in done.stderr and "riton" in done.stderr.splitlines()[-1]
