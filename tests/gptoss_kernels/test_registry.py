"""Choosing a backend: the reason is told, an explicit wish is honoured or refused, nothing falls back in silence."""
import pytest

from gptoss_kernels import registry
from gptoss_kernels.registry import BackendUnavailable, backends, choose, register, why_not


@pytest.fixture(autouse=True)
def _own_operations(monkeypatch):
    monkeypatch.setattr(registry, "_OPERATIONS", {})

    @register("double", "vendor", rank=0, obstacle=lambda device="cpu", **_: None if device == "cuda" else "needs CUDA")
    def vendor(x):
        return ("vendor", 2 * x)

    @register("double", "reference", rank=9)
    def reference(x):
        return ("reference", 2 * x)


def test_auto_takes_the_best_that_can_run_and_names_what_was_passed_over():
    choice = choose("double", device="cpu")
    assert choice.backend == "reference" and "not vendor: needs CUDA" in choice.reason
    assert choice.function(3) == ("reference", 6)
    assert choose("double", device="cuda").backend == "vendor"


def test_an_explicit_backend_is_honoured_or_refused_never_replaced():
    assert choose("double", "reference", device="cuda").backend == "reference"
    with pytest.raises(BackendUnavailable, match="'vendor' cannot run here: needs CUDA"):
        choose("double", "vendor", device="cpu")


def test_unknown_names_list_what_there_is():
    with pytest.raises(BackendUnavailable, match="vendor, reference"):
        choose("double", "cuda-graphs")
    with pytest.raises(BackendUnavailable, match="there are double"):
        choose("triple")


def test_obstacles_can_be_asked_for():
    assert backends("double", device="cpu") == {"vendor": "needs CUDA", "reference": None}
    assert why_not("double", "vendor", device="cuda") is None


def test_a_second_function_under_one_name_is_refused():
    with pytest.raises(ValueError, match="already has a backend called 'reference'"):
        @register("double", "reference", rank=1)
        def other(x):
            return x


def test_no_backend_at_all_is_an_error():
    register("stuck", "vendor", rank=0, obstacle=lambda **_: "absent")(lambda: None)
    with pytest.raises(BackendUnavailable, match="no backend can run here: not vendor: absent"):
        choose("stuck")
