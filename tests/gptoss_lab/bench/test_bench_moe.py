"""How the MoE benchmark takes its readings; what it reads needs a GPU."""
from gptoss_lab.bench import moe


def test_a_product_with_its_bias_and_without_takes_turns_with_itself_alone(monkeypatch):
    together = []

    def interleaved(calls, repetitions):
        together.append(set(calls))
        return {name: [call()] * repetitions for name, call in calls.items()}

    monkeypatch.setattr(moe.timing, "interleaved", interleaved)
    pair = "gemm1" + moe.BIAS_OR_NONE
    runs = {f"{run.kernel}|{run.backend}": run for run in (
        moe.Run("gemm1", "cuda", lambda: 1.0), moe.Run("gemm1", "deepgemm", lambda: 2.0),
        moe.Run(pair, "cuda", lambda: 3.0), moe.Run(pair, "cuda without bias", lambda: 4.0),
        moe.Run("layer", "cuda", lambda: 8.0, divisor=4))}
    readings = moe._in_turn(runs, 2)
    assert together == [{"gemm1|cuda", "gemm1|deepgemm", "layer|cuda"}, {f"{pair}|cuda", f"{pair}|cuda without bias"}]
    assert list(readings) == list(runs)
    assert readings["layer|cuda"] == [2.0] * 2 and readings[f"{pair}|cuda"] == [3.0] * 2 * moe.PAIRED
