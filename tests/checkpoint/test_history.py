"""Which checkpoints count, as a pure function of names: against a model that simply keeps a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.checkpoint.history import Generation, chain, next_number, successor_lineage
from torchrelay.checkpoint.layout import ManifestRef

_COMMIT = st.tuples(st.just("commit"), st.integers(1, 3))
_START = st.tuples(st.just("start"), st.integers(0, 4))
_ZOMBIE = st.tuples(st.just("zombie"), st.integers(1, 6), st.integers(1, 8))


def _generation(number: int, begin: ManifestRef | None, newest: Generation | None) -> Generation:
    lineage = successor_lineage(newest, begin)
    return Generation(run_id="r", number=number, begin=begin, lineage=lineage, nonce="", info={})


@given(st.lists(st.one_of(_COMMIT, _START, _ZOMBIE), max_size=60), st.randoms(use_true_random=False))
def test_the_line_is_what_a_list_would_say(events: list[tuple[object, ...]], random: object) -> None:
    """Commits append; a start goes back k checkpoints and forgets what lay beyond; whatever zombies write is never on the line."""
    newest = _generation(1, None, None)
    line: list[ManifestRef] = []
    names: list[ManifestRef] = []
    for event in events:
        match event:
            case ("commit", int(steps)):
                last = line[-1].step if line else 0
                ref = ManifestRef(max(last, newest.begin_step) + steps, newest.number)
                if ref not in names:
                    names.append(ref)
                line.append(ref)
            case ("start", int(back)):
                line = line[: max(0, len(line) - back)]
                begin = line[-1] if line else None
                number = next_number([newest.number], names)
                newest = _generation(number, begin, newest)
            case ("zombie", int(age), int(steps)) if newest.number > age:
                # It goes on where its own line was, past the step at which it was succeeded.
                old = newest.number - age
                floor = max(
                    (last for generation, last in newest.lineage if generation == old), default=newest.begin_step
                )
                ref = ManifestRef(floor + steps, old)
                if ref not in names:
                    names.append(ref)
        getattr(random, "shuffle")(names)  # noqa: B009 - the strategy's type says only that it is an object
        assert list(chain(newest, names)) == line


@given(st.lists(st.integers(1, 50)), st.lists(st.tuples(st.integers(1, 99), st.integers(1, 50))))
def test_numbers_are_never_given_twice(generations: list[int], manifests: list[tuple[int, int]]) -> None:
    """Also when a generation record was lost and only its manifests are left."""
    refs = [ManifestRef(step, generation) for step, generation in manifests]
    number = next_number(generations, refs)
    assert number > max([0, *generations, *(ref.generation for ref in refs)])
