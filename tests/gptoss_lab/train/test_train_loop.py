"""A phase: its schedule, its log, and that a run that was stopped ends as if it had not been."""
from dataclasses import replace

import pytest
import torch

from gptoss_lab.train import loop
from gptoss_lab.train.loop import Clock, Log, rate_factor, run_phase, snapshot, write_state
from gptoss_lab.train.model import TrainedModel
from gptoss_lab.train.optimiser import Optimiser
from gptoss_lab.train.run import prepare
from gptoss_lab.train.settings import SMOKE
from gptoss_lab.train.trainees import ModelTrainee

SETTINGS = replace(SMOKE, tokens=512, log_every=2, save_every=0.0, vocabulary_sample=200)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return prepare(SETTINGS, tmp_path_factory.mktemp("loop"))


def phase(run, clock, state=None, save=None):
    from gptoss_lab.train.batches import stream

    model = TrainedModel(SETTINGS.draft, run.vocabulary.rows, run.vocabulary.others)
    trainee = ModelTrainee(model, 0.01, "reference")
    optimiser = Optimiser(model.named_parameters(), muon=0.02, adamw=0.003)
    if state is not None:
        trainee.load(state["trainee"])
        optimiser.load_state_dict(state["optimiser"])
        clock.step, clock.used = state["step"], state["used"]
    batches = stream(0, SETTINGS.tokens, run.vocabulary, 131_072, first=clock.step)
    log = Log(None)
    run_phase("model", trainee, optimiser, batches, clock, SETTINGS, log, save)
    return model, log, snapshot("model", trainee, optimiser, clock)


def test_interrupted_and_resumed_is_as_if_never_stopped(run, tmp_path):
    whole, log, _ = phase(run, Clock(0, steps=8))
    saved = []
    phase(run, Clock(0, steps=8), save=lambda s: saved.append(s["step"]) or (
        write_state(tmp_path / "s.pt", s) if s["step"] == 4 else None))
    assert saved == [2, 4, 6, 8]
    state = torch.load(tmp_path / "s.pt", weights_only=True)
    assert state["step"] == 4 and state["phase"] == "model"
    again, _, _ = phase(run, Clock(0, steps=8), state)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    assert [row["step"] for row in log.rows] == [2, 4, 6, 8]
    assert [row["quantised"] for row in log.rows] == [False, False, False, True]


def test_progress_follows_time_or_steps():
    clock = Clock(10.0)
    clock.used = 2.5
    assert clock.progress == 0.25
    clock.used = 99.0
    assert clock.progress == 1.0
    counted = Clock(10.0, steps=4)
    counted.tick()
    assert counted.progress == 0.25 and counted.step == 1


def test_the_rate_warms_up_stays_and_falls_to_zero():
    settings = replace(SMOKE, warmup=10, decay_from=0.5)
    factors = []
    for step in (0, 4, 9, 50, 75, 100):
        clock = Clock(0, steps=100, step=step)
        factors.append(rate_factor(clock, settings))
    assert factors == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 0.0])


def test_a_loss_that_is_not_finite_stops_the_run(run, monkeypatch):
    monkeypatch.setattr(loop, "_finite", lambda value: False)
    with pytest.raises(RuntimeError, match="model: step 2 has .* lower the learning rates"):
        phase(run, Clock(0, steps=4))


class Breaks(ModelTrainee):
    """Its loss is not finite at the calls named."""

    def __init__(self, model, at):
        super().__init__(model, 0.01, "reference")
        self.at, self.calls = at, 0

    def loss(self, batch, quantised):
        self.calls += 1
        loss, scalars = super().loss(batch, quantised)
        if self.calls in self.at:
            loss = loss * float("nan")
            scalars["loss"] = loss.detach()
        return loss, scalars


def broken_phase(run, at, steps=8):
    from gptoss_lab.train.batches import stream

    model = TrainedModel(SETTINGS.draft, run.vocabulary.rows, run.vocabulary.others)
    trainee, clock, log = Breaks(model, at), Clock(0, steps=steps), Log(None)
    optimiser = Optimiser(model.named_parameters(), muon=0.02, adamw=0.003)
    batches = stream(0, SETTINGS.tokens, run.vocabulary, 131_072)
    run_phase("model", trainee, optimiser, batches, clock, replace(SETTINGS, keep_every=0.0), log)
    return model, clock, log


def test_a_fall_goes_back_to_the_last_good_state_with_half_the_rates(run):
    model, clock, log = broken_phase(run, {4})
    fall = next(row for row in log.rows if row.get("event") == "fall")
    assert (fall["back_to"], fall["falls"], clock.falls, clock.step) == (2, 1, 1, 8)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    rates = {row["step"]: row["rate"] for row in log.rows if "rate" in row}
    whole = {row["step"]: row["rate"] for row in phase(run, Clock(0, steps=8))[1].rows}
    assert rates[2] == whole[2] and rates[6] == pytest.approx(whole[6] / 2) and log.rows[-1]["loss"] < 13


def test_too_many_falls_and_a_first_one_end_the_phase(run):
    with pytest.raises(RuntimeError, match="model: step 10 has .* after 3 falls; lower the learning rates"):
        broken_phase(run, {4, 6, 8, 10}, steps=12)
    with pytest.raises(RuntimeError, match="step 2 has .* after 0 falls"):
        broken_phase(run, {1, 2})


def test_log_lines_are_json(tmp_path, capsys):
    import json

    log = Log(tmp_path / "log.jsonl")
    log(phase="model", loss=1.23456789, step=3)
    log(event="end")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == log.rows == [{"phase": "model", "loss": 1.2346, "step": 3}, {"event": "end"}]
