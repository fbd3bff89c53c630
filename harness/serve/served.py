"""What became of each request of a cluster, with its time broken down.

The parts follow each other and add up to the time to the first token: *schedule* (waiting for
blocks and for the first step), *lookup*, *KV read* (from the tier into the GPU of the server that
computes the first token), *compute*, *KV write* (what the first token waits for: publication, and
the P→D transfer).

Units: s of the run, tokens, blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Population:
    """How many requests are in a cluster, integrated over time as they come and go."""

    inside: int = 0
    area_s: float = 0.0
    """Requests times seconds so far."""
    first_s: float = 0.0
    last_s: float = 0.0
    """When somebody came or went."""
    entered: int = 0

    def change(self, now_s: float, by: int) -> None:
        """Note that ``by`` requests came (negative: went)."""
        if not self.entered:
            self.first_s = now_s
        else:
            self.area_s += self.inside * (now_s - self.last_s)
        self.entered += max(by, 0)
        self.inside += by
        self.last_s = now_s


@dataclass(slots=True, kw_only=True)
class Served:
    """One request."""

    request_id: int
    session: str
    turn: int
    server: int
    decoder: int
    input_tokens: int
    output_tokens: int
    reusable: int
    """Blocks of the prompt that could be reused."""
    seen: int
    """Of them, those that some server had computed before."""
    matched: int
    """Found in the GPU of the prefill server."""
    found: int = 0
    """Announced by the tier."""
    loaded: int = 0
    """Delivered by the tier to the prefill server."""
    computed_tokens: int = 0
    """Of the prompt, on all servers together."""
    stored: int = 0
    """Blocks that the tier took from this request."""
    decode_loaded: int = 0
    """Blocks that the decode server read from the tier."""
    decode_read_s: float = 0.0
    """Getting the prompt's KV into the decode server's GPU: part of *KV write* over a link, of
    *KV read* through the tier."""
    arrival_s: float
    schedule_s: float = 0.0
    lookup_s: float = 0.0
    read_s: float = 0.0
    compute_s: float = 0.0
    write_s: float = 0.0
    first_token_s: float = 0.0
    late_s: float = 0.0
    """How much later the host really had the first token; 0 in virtual time."""
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self.end_s - self.arrival_s

    @property
    def parts_s(self) -> dict[str, float]:
        """The time to the first token, broken down."""
        return {
            "schedule": self.schedule_s,
            "lookup": self.lookup_s,
            "KV read": self.read_s,
            "compute": self.compute_s,
            "KV write": self.write_s,
        }
