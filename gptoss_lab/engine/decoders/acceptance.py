"""How many proposals stood: counted as a decoder runs, in the terms in which cost/speculation.py predicts.

A round proposes some tokens and checks them in order; the first that fails ends it, and those behind it are never
tested. So two shares must not be mixed up: accepted of proposed, which falls with the draft length, and accepted of
tested, which is the chance that a proposal stands and what the prediction 1 + a + ... + a^k takes.
"""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Acceptance:
    """Counts over rounds of verification. tested[i], stood[i]: how often the proposal at place i was tested, and stood.

    Tokens that the engine dropped because a stop id came before them count like others.
    """

    rounds: int = 0
    proposed: int = 0
    tested: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)

    def add(self, proposed: int, accepted: int) -> None:
        """One round: `proposed` tokens, of which the first `accepted` stood."""
        if not 0 <= accepted <= proposed:
            raise ValueError(f"{accepted} of {proposed} proposals were accepted; at most all of them can be")
        self.rounds += 1
        self.proposed += proposed
        while len(self.tested) < proposed:
            self.tested.append(0)
            self.stood.append(0)
        for place in range(min(accepted + 1, proposed)):
            self.tested[place] += 1
            self.stood[place] += place < accepted

    @property
    def accepted(self) -> int:
        """Proposals that stood."""
        return sum(self.stood)

    @property
    def share(self) -> float:
        """Accepted of proposed; 0 before anything was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted of tested: the chance that a proposal stands once those before it did. 0 before any test."""
        return self.accepted / sum(self.tested) if self.proposed else 0.0

    @property
    def by_place(self) -> list[float]:
        """The same for each place of a draft, 0 where none was tested."""
        return [stood / tested if tested else 0.0 for stood, tested in zip(self.stood, self.tested, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens that a round yields: those accepted and one of the model's own. 0 before the first round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0
