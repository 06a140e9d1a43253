"""The simulated fleet against queueing theory, against sums by hand, and against what must never happen."""
import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.cost import CostError, queueing
from gptoss_lab.cost.fleet import DecodeReplica, Fleet, Lengths, simulate


def means(what, fleet_of, rate, outputs, requests, seeds):
    """(mean, standard error) of a statistic over independent simulations."""
    values = [simulate(fleet_of(seed), rate, Lengths(100), outputs, requests, seed).mean(what) for seed in seeds]
    return np.mean(values), np.std(values, ddof=1) / len(values) ** 0.5


def close(mean, error, exact):
    """Within four standard errors, which are at most 6 % of the exact value."""
    assert error < 0.06 * exact
    assert abs(mean - exact) < 4 * error + 0.01 * exact


@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_one_prefill_replica_and_equal_prompts_wait_as_in_m_d_1(rho):
    found = means("prefill_wait", lambda seed: Fleet(1, 1, lambda tokens: 0.1, [1e-9]), 10 * rho, Lengths(2), 6000,
                  range(6))
    close(*found, queueing.mg1_mean_wait(10 * rho, 0.1))


@pytest.mark.parametrize(("servers", "rho"), [(1, 0.6), (4, 0.75)])
def test_exponential_service_waits_as_in_m_m_c(servers, rho):
    def fleet(seed):
        rng = np.random.default_rng((seed, 99))
        return Fleet(servers, 1, lambda tokens: rng.exponential(0.1), [1e-9])

    found = means("prefill_wait", fleet, 10 * rho * servers, Lengths(2), 8000, range(8))
    close(*found, queueing.mmc_mean_wait(10 * rho * servers, 0.1, servers))


def test_quantiles_of_the_wait_are_those_of_m_m_c():
    rng = np.random.default_rng(5)
    report = simulate(Fleet(2, 1, lambda tokens: rng.exponential(0.1), [1e-9]), 14, Lengths(100), Lengths(2), 40_000)
    for quantile, simulated in zip((0.5, 0.95), report.quantiles("prefill_wait", (0.5, 0.95)), strict=True):
        assert simulated == pytest.approx(queueing.mmc_wait_quantile(14, 0.1, 2, quantile), rel=0.12)


@pytest.mark.parametrize("variation", [0.0, 1.0])
def test_a_batch_whose_steps_grow_with_it_is_a_shared_server_whatever_the_lengths(variation):
    """The mean time per answer does not depend on the distribution of lengths: 100 tokens in the mean, 1 ms each."""
    steps = [1e-3 * n for n in range(1, 300)]
    outputs = Lengths(101, variation, least=2)
    stays = []
    for seed in range(4):
        report = simulate(Fleet(1000, 1, lambda tokens: 1e-9, steps), 6, Lengths(100), outputs, 6000, seed)
        rng = np.random.default_rng(seed)
        rng.exponential(1, 6000)
        Lengths(100).draw(rng, 6000)
        answers = np.maximum(2, outputs.draw(rng, 6000))[600:]
        stays.append(np.mean([s.per_token * (n - 1) for s, n in zip(report.served, answers, strict=True)])
                     / ((answers.mean() - 1) * 1e-3))
    exact = queueing.shared_mean_stay(6, 0.1) / 0.1
    assert np.mean(stays) == pytest.approx(exact, rel=0.08)


def test_a_lonely_request_takes_its_own_time():
    fleet = Fleet(1, 1, lambda tokens: 0.001 * tokens, [0.01, 0.5], lambda tokens: 0.25)
    report = simulate(fleet, 1e-4, Lengths(100), Lengths(11), 50)
    for served in report.served:
        assert served.prefill_wait == served.decode_wait == 0
        assert served.first_token == pytest.approx(0.1)
        assert served.per_token == pytest.approx((0.25 + 10 * 0.01) / 10)       # the transfer delays the second token


def test_two_in_a_batch_slow_each_other_down_and_a_third_waits():
    env = simpy.Environment()
    replica, done = DecodeReplica(env, [0.1, 0.15]), {}

    def join(name, at, tokens):
        yield env.timeout(at)
        wait = yield env.process(replica.join(tokens))
        done[name] = (env.now, wait)

    for name, at, tokens in (("a", 0.0, 10), ("b", 0.5, 10), ("c", 0.6, 1)):
        env.process(join(name, at, tokens))
    env.run()
    # a alone for 0.5 s: 5 tokens. With b, 0.15 s a token: a ends at 0.5 + 5 * 0.15 = 1.25. Then c joins b for a token.
    assert done["a"] == (pytest.approx(1.25), 0)
    assert done["c"] == (pytest.approx(1.25 + 0.15), pytest.approx(0.65))
    assert done["b"] == (pytest.approx(1.40 + 4 * 0.1), 0)              # 5 tokens beside a, 1 beside c, 4 alone


@pytest.mark.parametrize("later", range(6))
def test_a_place_that_was_promised_is_not_taken_by_who_comes_at_that_very_moment(later):
    env = simpy.Environment()
    replica, order, most = DecodeReplica(env, [0.5]), [], []

    def join(name, at):
        yield env.timeout(at)
        for _ in range(later if name == "c" else 0):                     # so many events of the same moment come first
            yield env.timeout(0)
        yield env.process(replica.join(2))
        order.append((name, env.now))

    def watch():
        while env.now < 4:
            most.append(len(replica.active))
            yield env.timeout(0.25)

    for name, at in (("a", 0.0), ("b", 0.5), ("c", 1.0)):                # a leaves when c comes; b has waited
        env.process(join(name, at))
    env.process(watch())
    env.run()
    assert order == [("a", 1.0), ("b", 2.0), ("c", 3.0)] and max(most) == 1


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.floats(0.5, 60))
def test_whatever_the_load_everyone_is_served_and_nobody_faster_than_possible(seed, first, second, batch, rate):
    steps = [0.01 + 0.001 * n for n in range(batch)]
    fleet = Fleet(first, second, lambda tokens: 1e-4 * tokens, steps, usd_per_hour=6.0)
    report = simulate(fleet, rate, Lengths(500, 1.0), Lengths(20, 0.5, least=2), 200, seed)
    assert len(report.served) == 180
    assert all(s.per_token >= 0.01 * (1 - 1e-9) and s.first_token >= s.prefill_wait >= 0 and s.decode_wait >= -1e-9
               for s in report.served)
    assert 0 <= report.prefill_busy <= 1 + 1e-9 and 0 <= report.decode_fill <= 1 + 1e-9
    assert report.usd_per_day == 144.0


def test_the_same_seed_is_the_same_day_and_another_one_is_not():
    fleet = Fleet(1, 1, lambda tokens: 0.05, [0.01] * 8)
    days = [simulate(fleet, 5, Lengths(100, 1), Lengths(50, 1, least=2), 300, seed).table() for seed in (1, 1, 2)]
    assert days[0] == days[1] != days[2]


def test_busy_is_the_offered_load():
    report = simulate(Fleet(4, 2, lambda tokens: 0.1, [0.01] * 16), 20, Lengths(100), Lengths(51), 20_000)
    assert report.prefill_busy == pytest.approx(20 * 0.1 / 4, rel=0.03)
    assert report.decode_fill == pytest.approx(20 * 50 * 0.01 / 32, rel=0.03)


def test_lengths_have_their_mean_and_their_limits():
    rng = np.random.default_rng(0)
    drawn = np.array(Lengths(1000, 1.0, most=100_000).draw(rng, 100_000))
    assert drawn.mean() == pytest.approx(1000, rel=0.02) and drawn.std() == pytest.approx(1000, rel=0.05)
    assert set(Lengths(7).draw(rng, 100)) == {7}
    assert max(Lengths(1000, 2.0, most=1500).draw(rng, 1000)) == 1500


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Fleet(0, 1, float, [1.0]), "prefill_replicas is 0"),
    (lambda: Fleet(1, 0, float, [1.0]), "decode_replicas is 0"),
    (lambda: Fleet(1, 1, float, []), "step_seconds needs"), (lambda: Fleet(1, 1, float, [0.0]), "step_seconds needs"),
    (lambda: simulate(Fleet(1, 1, lambda t: 1.0, [1.0]), 0, Lengths(1), Lengths(2)), "requests_per_second is 0"),
    (lambda: simulate(Fleet(1, 1, lambda t: 1.0, [1.0]), 1, Lengths(1), Lengths(2), 5), "requests is 5"),
    (lambda: simulate(Fleet(1, 1, lambda t: 1.0, [1.0]), 1, Lengths(-1), Lengths(2)), "mean length is -1"),
])
def test_wrong_inputs_are_named(make, message):
    with pytest.raises(CostError, match=message):
        make()
