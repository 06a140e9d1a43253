"""What /metrics tells, in a registry of each server's own."""
from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("gptoss_http_requests", "HTTP requests answered.", ("path", "status"), registry=own)
        self.prompt_tokens = Counter("gptoss_prompt_tokens", "Tokens of prompts.", registry=own)
        self.generated_tokens = Counter("gptoss_generated_tokens", "Tokens that the engine found.", registry=own)
        self.finished = Counter("gptoss_answers", "Answers by how they ended.", ("reason",), registry=own)
        self.open = Gauge("gptoss_open_answers", "Answers being written, waiting ones too.", registry=own)
        self.engine_up = Gauge("gptoss_engine_up", "1 while the engine takes requests.", registry=own)
        self.engine_deaths = Gauge("gptoss_engine_deaths", "How often the engine's process died.", registry=own)
        self.first_token = Histogram(
            "gptoss_first_token_seconds", "From request to first token.", buckets=SECONDS, registry=own)
        self.whole = Histogram("gptoss_answer_seconds", "From request to last token.", buckets=SECONDS, registry=own)
