"""Waiting in closed form, for the cases that have one: the yardstick of the simulation in `fleet`.

M/M/c  Poisson arrivals, exponential service, c servers, one queue (Erlang C).
M/G/1  Poisson arrivals, any service, one server (Pollaczek and Khinchine); M/D/1 where every service takes as long.
PS     one server shared evenly by all that are present: the mean stay does not depend on the distribution of the work.

All take the arrival rate (per second) and the mean service time (seconds); CostError where the queue would grow for
ever.
"""
from __future__ import annotations

import math

from gptoss_lab.cost.errors import CostError, check_count, check_positive


def load(arrivals_per_second: float, service_seconds: float, servers: int = 1) -> float:
    """Utilisation of each server, in (0, 1). CostError if it is 1 or more."""
    check_count("servers", servers, least=1)
    offered = check_positive("arrivals_per_second", arrivals_per_second) * check_positive(
        "service_seconds", service_seconds) / servers
    if offered >= 1:
        raise CostError(f"utilisation is {offered:.3g}; below 1 is needed, or the queue grows for ever")
    return offered


def wait_probability(arrivals_per_second: float, service_seconds: float, servers: int = 1) -> float:
    """Erlang C: the probability that an arrival of an M/M/c queue has to wait."""
    rho = load(arrivals_per_second, service_seconds, servers)
    blocked = 1.0                                                       # Erlang B by its recursion, no factorials
    for n in range(1, servers + 1):
        blocked = rho * servers * blocked / (n + rho * servers * blocked)
    return blocked / (1 - rho * (1 - blocked))


def mmc_mean_wait(arrivals_per_second: float, service_seconds: float, servers: int = 1) -> float:
    """Mean seconds of waiting in M/M/c, those who do not wait counted as 0."""
    rho = load(arrivals_per_second, service_seconds, servers)
    return wait_probability(arrivals_per_second, service_seconds, servers) * service_seconds / (servers * (1 - rho))


def mmc_wait_quantile(arrivals_per_second: float, service_seconds: float, servers: int, quantile: float) -> float:
    """The wait in seconds that the share `quantile` of arrivals of M/M/c does not exceed."""
    if not 0 <= quantile < 1:
        raise CostError(f"quantile is {quantile!r}; a number in [0, 1) is expected")
    rho = load(arrivals_per_second, service_seconds, servers)
    waiting = wait_probability(arrivals_per_second, service_seconds, servers)
    if 1 - quantile >= waiting:
        return 0.0
    return service_seconds / (servers * (1 - rho)) * math.log(waiting / (1 - quantile))


def mg1_mean_wait(arrivals_per_second: float, service_seconds: float, variation: float = 0.0) -> float:
    """Mean seconds of waiting in M/G/1. variation: standard deviation of the service over its mean; 0 is M/D/1."""
    rho = load(arrivals_per_second, service_seconds)
    if not variation >= 0:
        raise CostError(f"variation is {variation!r}; a number of at least 0 is expected")
    return rho * service_seconds * (1 + variation**2) / (2 * (1 - rho))


def shared_mean_stay(arrivals_per_second: float, service_seconds: float) -> float:
    """Mean seconds that a request stays with one server shared evenly by all present (M/G/1-PS)."""
    return service_seconds / (1 - load(arrivals_per_second, service_seconds))
