"""Saves, falls, forgetting and sweeping in any order, against a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.checkpointing import RUN, begin, latest, make_shards, new_run
from tests.referring import is_whole, save_with, sweep_all
from torchrelay.checkpoint.commit import write_shard
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.retention import forget
from torchrelay.checkpoint.survey import take_survey
from torchrelay.store.memory import MemoryStore


class Care(RuleBasedStateMachine):
    """Saves, falls, forgetting and sweeping in any order: the line of a model stays whole to the last byte."""

    @initialize()
    def start(self) -> None:
        """An empty run."""
        self.store = MemoryStore()
        self.generation = new_run(self.store).generation
        self.step, self.line = 0, list[ManifestRef]()
        self.base: ManifestRef | None = None

    @rule(refer=st.booleans())
    def save(self, refer: bool) -> None:
        """A save, of which a part may not have changed."""
        self.step += 1
        ref = ManifestRef(self.step, self.generation)
        if refer and self.line:
            save_with(self.store, ref, self.line[-1])
        else:
            save_with(self.store, ref)
        self.line.append(ref)

    @rule()
    def half_a_save(self) -> None:
        """Written by one rank of two, then never again."""
        self.step += 1
        with ThreadPoolExecutor(1) as executor:
            write_shard(self.store, make_shards(ManifestRef(self.step, self.generation))[0], executor=executor)

    @rule()
    def successor(self) -> None:
        """The generation falls."""
        claim = begin(self.store)
        assert claim.begin == (self.line[-1] if self.line else None)
        self.generation, self.step, self.base = claim.generation, claim.begin_step, claim.begin

    @rule(pick=st.integers(0, 30))
    def forget(self, pick: int) -> None:
        """Any of the line; the needed ones are refused."""
        if not self.line:
            return
        ref = self.line[pick % len(self.line)]
        needed = ref in (self.line[-1], self.base)
        assert forget(self.store, RUN, ref, why="a test") == (not needed)
        if not needed:
            self.line.remove(ref)

    @rule()
    def sweep(self) -> None:
        """All that may go."""
        sweep_all(self.store)
        assert not list(take_survey(self.store, RUN).of("forgotten", "debris"))

    @invariant()
    def what_counts_is_whole(self) -> None:
        """Every checkpoint of the model's line is there, every hash is right, and nothing is unexplained."""
        assert list(read_history(self.store, RUN).line) == self.line
        for ref in self.line:
            assert is_whole(self.store, ref)
        survey = take_survey(self.store, RUN)
        assert not survey.missing
        assert not list(survey.of("unknown"))
        assert latest(self.store) == (self.line[-1] if self.line else None)


Care.TestCase.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCare = Care.TestCase
