"""Random streams that never meet.

A stream is named by (seed, run id, purpose, rank, step). Two runs that differ in anything draw independent numbers, or
the difference of their released weights would cancel the noise.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from dataclasses import dataclass, field, replace
from typing import Any

import torch

# PyTorch's CPU generator is a Mersenne twister: 624 words in 8-byte slots, after 24 bytes of seed and counters.
_WORDS, _FIRST_WORD = 624, 24


@dataclass(frozen=True)
class Stream:
    """A family of generators, one per step. With ``seed=None`` the seed is drawn from the system and kept nowhere, and
    deep copies and pickles of the stream, and processes that were forked with it, draw other numbers, each its own."""

    purpose: str
    seed: int | None = None
    run_id: str = ""
    rank: int = 0
    _entropy: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    _shared: bool = field(default=False, repr=False)

    def sharing(self, entropy: str) -> Stream:
        """The same stream for everybody who knows ``entropy``; a seed, where there is one, is shared already."""
        return replace(self, _entropy=entropy, _shared=True)

    def renewed(self) -> Stream:
        """A stream that has drawn nothing yet, for everybody who shares this one; itself where a seed says what is drawn."""
        if self.seed is not None:
            return self
        return replace(self, _entropy=hashlib.sha256(f"renewed:{self._entropy}".encode()).hexdigest())

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        fixed = self.seed is not None or self._shared
        return self if fixed else replace(self, _entropy=secrets.token_hex(16))

    def __reduce__(self) -> tuple[Any, ...]:
        """Process numbers come again (in every container), so entropy that is written down would be drawn from twice."""
        entropy = self._entropy if self.seed is not None or self._shared else None
        return _read, (self.purpose, self.seed, self.run_id, self.rank, entropy, self._shared)

    @property
    def root(self) -> str:
        """What tells this stream from its copies: what was drawn at another root belongs to somebody else."""
        own = "" if self._shared else f":{os.getpid()}"  # a fork has the entropy of its parent, and must not have its noise
        return f"seed:{self.seed}" if self.seed is not None else f"entropy:{self._entropy}{own}"

    def at(self, step: int, device: torch.device | str = "cpu") -> torch.Generator:
        """The generator of one step, the same whenever it is asked for."""
        name = f"{self.root}|run:{self.run_id}|purpose:{self.purpose}|rank:{self.rank}|step:{step}"
        device = torch.device(device)
        if device.type != "cpu":
            name += f"|device:{device.type}:{device.index or 0}"
        words = hashlib.shake_256(name.encode()).digest(8 + 4 * _WORDS)
        generator = torch.Generator(device=device).manual_seed(int.from_bytes(words[:8], "little") & (2**63 - 1))
        return _filled(generator, words[8:]) if device.type == "cpu" else generator


class Once:
    """A stream's generators, step by step. Those of a step that comes again, because its run was set back or broken off, are
    others, unless they are seeded: what is drawn for a row depends on how many are before it. If the same numbers met two
    batches, one record more in one of them would change which rows of the other all that follow have theirs in common with."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self._next = stream, 0

    def at(self, step: int, device: torch.device | str = "cpu") -> torch.Generator:
        if step < self._next:
            self.stream = self.stream.renewed()
        self._next = step + 1
        return self.stream.at(step, device)


def _read(purpose: str, seed: int | None, run_id: str, rank: int, entropy: str | None, shared: bool) -> Stream:
    return Stream(purpose, seed, run_id, rank, secrets.token_hex(16) if entropy is None else entropy, shared)


def _filled(generator: torch.Generator, words: bytes) -> torch.Generator:
    """A CPU generator whose whole state comes from ``words``: `manual_seed` alone would use 32 bits of the seed, and two
    steps of a long run would draw the same noise."""
    state = generator.get_state()
    slots = torch.frombuffer(bytearray(words), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
    state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS] = slots.view(torch.uint8)
    generator.set_state(state)
    return generator


def seed_layers(seed: int) -> None:
    """`torch.manual_seed` for the devices that are in use. For every other kind PyTorch would keep the seed until it is, and write
    out the whole stack, at every call, to say where it came from."""
    torch.default_generator.manual_seed(seed)
    for kind in (torch.cuda, torch.xpu):
        if kind.is_initialized():
            kind.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def fill_normal(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Independent standard normals in every entry of ``out``, as far out as any release needs them.

    PyTorch's float32 normals are made of uniforms of 24 bits, and none is longer than √(2·24·ln 2) = 5.77 (6.8 on a GPU). Whatever
    lies beyond could only come from the neighbour whose sum is larger: σ = 0.6 and 20 expected draws of a record give that away
    with probability 4·10⁻⁴, whatever ε is. (z₁ + z₂)/√2 is as normal, and ends at 8.2: 10⁻⁹.
    """
    if out.dtype == torch.float64:  # of 53 bits: up to 8.6
        return out.normal_(generator=generator)
    half = math.sqrt(0.5)
    return out.normal_(std=half, generator=generator).add_(torch.empty_like(out).normal_(std=half, generator=generator))


class SharedWords:
    """Words that only those who hold the key can draw, in step with each other: SHAKE-256 of 32 bytes from the system.

    Each draw replaces the key by a part of its output that is used for nothing else, so that who reads the memory later
    cannot compute earlier draws.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"the key has {len(key)} bytes; give 32 from os.urandom")
        self._key = key

    def __call__(self, count: int) -> torch.Tensor:
        stream = hashlib.shake_256(b"erlangen shared words" + self._key).digest(32 + 8 * count)
        self._key = stream[:32]
        return torch.frombuffer(bytearray(stream[32:]), dtype=torch.int64) if count else torch.zeros(0).long()


def secure_words(count: int) -> torch.Tensor:
    """``count`` 64-bit words from the operating system's cryptographic generator, as int64."""
    return torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64) if count else torch.zeros(0).long()


def secure_uniform(count: int) -> torch.Tensor:
    """Uniform float64 on the grid (k + ½)·2⁻⁵², never 0 or 1: with one bit more the largest would be rounded to 1."""
    return ((secure_words(count) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52
