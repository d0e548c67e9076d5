"""Random lives of KVCache under a fake engine whose memory says what every slot holds.

The KV of a token depends on its root and on all tokens before it, so that is what a slot holds
here: (root, tokens up to and including its own). A step collects copies and writes as it is
scheduled and applies them when launched, copies first; up to two steps are in flight. A step that
is doomed leaves garbage, and so does any later write that rests on garbage. Each step reads what its
queries see: all tokens before them, or in window groups the last ones only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rooftile.kvcache import NO_PAGE, KVCache, OutOfPages, PageCopy, PageTable
from tests.kvcache.recount import assert_consistent, tree_nodes

Content = tuple[object, tuple[int, ...]]  # root, tokens
Slot = tuple[int, int, int]  # group, page, offset
GARBAGE: Content = ("garbage", ())


class Token(int):
    """Token ids whose hashes are all equal: only exact comparison can tell prefixes apart."""

    def __hash__(self) -> int:
        return 0


TOKENS = st.integers(0, 1).map(Token)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=20)
COUNTS = st.sampled_from([1, 1, 1, 2, 3, 4, 8, 24])
LAGS = st.sampled_from([0, 0, 1])
# Mostly trim and go on; or compute what can be computed again; or trim later.
HABITS = st.sampled_from(["", "", "", "", "again", "lazy"])
ROOTS = st.sampled_from(["", "", "", "salt"])
WINDOWS = st.sampled_from([None, None, None, 0, 1, 2, 3, 5, 8, 13, 100])
GROUPS = st.lists(st.tuples(st.integers(4, 24), WINDOWS), min_size=1, max_size=3)


@dataclass(eq=False)
class Sequence:
    root: str
    tokens: list[int]
    table: PageTable
    # The step that writes its last tokens; a fork inherits it.
    last_step: int = 0
    first: int = 0  # queries from here on are yet to come


@dataclass
class Step:
    number: int
    copies: list[PageCopy] = field(default_factory=list)
    writes: dict[Slot, tuple[Sequence, int]] = field(default_factory=dict)  # position in sequence
    reads: list[tuple[Sequence, Slot, Content]] = field(default_factory=list)
    doomed: bool = False


class Machine(RuleBasedStateMachine):
    @initialize(
        groups=GROUPS,
        page_size=st.sampled_from([1, 2, 2, 4, 4, 8]),
        prefix_cache=st.sampled_from([True] * 9 + [False]),
    )
    def start(
        self, groups: list[tuple[int, int | None]], page_size: int, prefix_cache: bool
    ) -> None:
        num_pages = [pages for pages, _ in groups]
        self.windows = [window for _, window in groups]
        self.cache = KVCache(len(groups), num_pages, page_size, prefix_cache, self.windows)
        self.memory: dict[Slot, Content] = {}
        self.sequences: list[Sequence] = []
        self.preempted: list[tuple[str, list[int]]] = []
        self.past: list[tuple[str, list[int]]] = []  # finished
        self.open = Step(1)
        self.in_flight: list[Step] = []

    # The fake engine

    def slot(self, sequence: Sequence, group: int, position: int) -> Slot:
        page, offset = divmod(position, self.cache.page_size)
        return group, sequence.table.pages[group][page], offset

    def slots(self, sequence: Sequence, start: int, stop: int) -> list[tuple[Slot, int]]:
        """Those of positions `start` to `stop` that the table has not given back."""
        return [
            (self.slot(sequence, group, position), position)
            for group, trimmed in enumerate(sequence.table.num_trimmed)
            for position in range(max(start, trimmed * self.cache.page_size), stop)
        ]

    def seen(self, sequence: Sequence, first: int, stop: int) -> list[tuple[Slot, int]]:
        """What queries first .. stop - 1 see."""
        return [
            (self.slot(sequence, group, position), position)
            for group, window in enumerate(self.windows)
            for position in range(0 if window is None else max(0, first - window), stop)
        ]

    def run(self, step: Step, memory: dict[Slot, Content]) -> None:
        for copy in step.copies:
            for offset in range(self.cache.page_size):
                content = memory.get((copy.group, copy.source, offset), GARBAGE)
                memory[copy.group, copy.target, offset] = GARBAGE if step.doomed else content
        # By position, so that what a write rests on, in whichever sequence, is there before it.
        for slot, (sequence, position) in sorted(
            step.writes.items(), key=lambda write: write[1][1]
        ):
            before = [
                self.slot(sequence, group, position - 1)
                for group, window in enumerate(self.windows)
                if position and window != 0
            ]
            rotten = step.doomed or any(memory.get(other) == GARBAGE for other in before)
            content = (sequence.root, tuple(sequence.tokens[: position + 1]))
            memory[slot] = GARBAGE if rotten else content

    def preview(self) -> dict[Slot, Content]:
        """Memory as it will be once the open step has run."""
        memory = dict(self.memory)
        self.run(self.open, memory)
        return memory

    def snapshot(self) -> object:
        return (
            [list(pool._refcounts) for pool in self.cache._pools],
            {path: list(node.pages) for path, node in tree_nodes(self.cache).items()},
            [
                (list(map(list, s.table.pages)), list(s.table.num_trimmed), s.table.num_tokens)
                for s in self.sequences
            ],
            self.cache.stats(),
        )

    def pick(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    def can_release(self, sequence: Sequence) -> bool:
        """Not while the open step is to write a page of its that somebody else has adopted."""
        pages = {slot[:2] for slot, (writer, _) in self.open.writes.items() if writer is sequence}
        return not any(
            (group, page) in pages
            for other in self.sequences
            if other is not sequence
            for group, column in enumerate(other.table.pages)
            for page in column
        )

    def drop(self, sequence: Sequence) -> None:
        self.cache.release(sequence.table)
        self.sequences.remove(sequence)
        self.open.writes = {
            slot: write for slot, write in self.open.writes.items() if write[0] is not sequence
        }
        self.open.reads = [read for read in self.open.reads if read[0] is not sequence]

    def enter(self, root: str, tokens: list[int]) -> None:
        before = self.cache.stats()
        table = self.cache.admit(tokens, root)
        after = self.cache.stats()
        longest = self.longest_match(root, tokens)
        assert table.num_tokens == table.num_cached == longest
        assert after.free == before.free
        assert after.prefix_queries_tokens == before.prefix_queries_tokens + len(tokens)
        assert after.prefix_hit_tokens == before.prefix_hit_tokens + longest
        self.sequences.append(Sequence(root, tokens, table, first=max(0, longest - 1)))

    def longest_match(self, root: str, tokens: list[int]) -> int:
        """The most tokens whose last one, as a query, finds all that it sees in the tree."""
        size = self.cache.page_size
        nodes = tree_nodes(self.cache)
        path = []
        while node := nodes.get((root, tuple(tokens[: size * (len(path) + 1)]))):
            if size * (len(path) + 1) > len(tokens):
                break
            path.append(node)
        for end in range(size * len(path), 0, -size):
            seen = [
                path[position // size].pages[group]
                for group, window in enumerate(self.windows)
                for position in range(0 if window is None else max(0, end - 1 - window), end)
            ]
            if NO_PAGE not in seen:
                return end
        return 0

    # What happens to requests

    @precondition(lambda self: len(self.sequences) < 8)
    @rule(tokens=PROMPTS, root=ROOTS)
    def admit(self, tokens: list[int], root: str) -> None:
        self.enter(root, tokens)

    @precondition(lambda self: (self.sequences or self.past) and len(self.sequences) < 8)
    @rule(index=st.integers(0, 20), keep=st.integers(1, 40), tail=st.lists(TOKENS, max_size=6))
    def admit_with_a_known_prefix(self, index: int, keep: int, tail: list[int]) -> None:
        known = [(other.root, other.tokens) for other in self.sequences] + self.past
        root, tokens = known[index % len(known)]
        self.enter(root, tokens[:keep] + tail)

    @precondition(lambda self: self.preempted and len(self.sequences) < 8)
    @rule()
    def admit_the_preempted_again(self) -> None:
        self.enter(*self.preempted.pop())

    @precondition(lambda self: self.sequences)
    @rule(
        index=st.integers(0, 7), count=COUNTS, token=TOKENS, lag=LAGS, victim=st.integers(0, 7),
        habit=HABITS,
    )  # fmt: skip
    def advance_one(
        self, index: int, count: int, token: int, lag: int, victim: int, habit: str
    ) -> None:
        self.advance(self.pick(index), count, token, lag, victim, habit)

    @precondition(lambda self: self.sequences)
    @rule(count=COUNTS, token=TOKENS, lag=LAGS, victim=st.integers(0, 7), habit=HABITS)
    def advance_all(self, count: int, token: int, lag: int, victim: int, habit: str) -> None:
        for number, sequence in enumerate(list(self.sequences)):
            if sequence in self.sequences:
                self.advance(sequence, count, Token(token ^ (number & 1)), lag, victim, habit)

    def advance(
        self, sequence: Sequence, count: int, token: int, lag: int, victim: int, habit: str
    ) -> None:
        """A chunk of prefill, or one sampled token; preempts when out of pages."""
        if sequence.last_step == self.open.number:
            return
        table = sequence.table
        written = table.num_tokens
        if written == len(sequence.tokens):
            sequence.tokens = [*sequence.tokens, token]
        target = min(written + count, len(sequence.tokens))
        holders = Counter(page for s in self.sequences for page in s.table.pages[0])
        size = self.cache.page_size
        pages = -(-target // size) - len(table.pages[0])
        pages += bool(written % size) and holders[table.pages[0][-1]] > 1
        first = sequence.first if habit == "again" else written
        if habit != "lazy":
            self.trim(sequence, first)
        suffice = all(pages <= group.free + group.cached for group in self.cache.stats().groups)
        before = self.snapshot()
        try:
            copies = self.cache.extend(table, target)
        except OutOfPages:
            assert not suffice
            assert self.snapshot() == before
            chosen = self.pick(victim)
            if self.can_release(chosen):
                self.preempted.append((chosen.root, chosen.tokens))
                self.drop(chosen)
            return
        assert suffice
        self.open.copies += copies
        self.schedule_writes(sequence, written, target)
        for slot, position in self.seen(sequence, first, target):
            content = (sequence.root, tuple(sequence.tokens[: position + 1]))
            self.open.reads.append((sequence, slot, content))
        self.cache.publish(table, sequence.tokens[: len(sequence.tokens) - lag], self.open.number)
        sequence.last_step = self.open.number

    def trim(self, sequence: Sequence, first: int) -> None:
        self.cache.trim(sequence.table, first)
        sequence.first = first

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 7), back=st.integers(0, 2))
    def trim_one(self, index: int, back: int) -> None:
        """Between steps, or again and again."""
        sequence = self.pick(index)
        if sequence.last_step != self.open.number:
            self.trim(sequence, max(sequence.first, sequence.table.num_tokens - back))

    def schedule_writes(self, sequence: Sequence, start: int, stop: int) -> None:
        nodes = tree_nodes(self.cache).values()
        for slot, position in self.slots(sequence, start, stop):
            group, page, _ = slot
            assert all(page != node.pages[group] for node in nodes), "writes a page of the tree"
            for other in self.sequences:
                shares = other is not sequence and page in other.table.pages[group]
                assert not shares, "writes a page of another table"
            assert slot not in self.open.writes
            self.open.writes[slot] = (sequence, position)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 7))
    def match_more(self, index: int) -> None:
        sequence = self.pick(index)
        if sequence.last_step == self.open.number:
            return
        before = sequence.table.num_tokens
        gained = self.cache.match_more(sequence.table, sequence.tokens)
        assert sequence.table.num_tokens == before + gained <= len(sequence.tokens)
        if gained:
            sequence.first = before + gained - 1

    @precondition(lambda self: self.sequences and len(self.sequences) < 8)
    @rule(index=st.integers(0, 7))
    def fork(self, index: int) -> None:
        source = self.pick(index)
        before = self.cache.stats()
        table = self.cache.fork(source.table)
        assert self.cache.stats() == before
        self.sequences.append(
            Sequence(source.root, source.tokens, table, source.last_step, source.first)
        )

    @precondition(lambda self: len(self.sequences) > 2)
    @rule(index=st.integers(0, 7))
    def finish_or_abort(self, index: int) -> None:
        sequence = self.pick(index)
        if self.can_release(sequence):
            self.past.append((sequence.root, sequence.tokens))
            self.drop(sequence)

    @precondition(lambda self: self.sequences and self.open.number % 4 == 0)
    @rule()
    def finish_or_abort_all(self) -> None:
        for sequence in list(self.sequences):
            if self.can_release(sequence):
                self.past.append((sequence.root, sequence.tokens))
                self.drop(sequence)

    @precondition(lambda self: self.open.number % 6 == 0)
    @rule()
    def reset_prefix(self) -> None:
        self.cache.reset_prefix()
        assert not tree_nodes(self.cache)

    # What happens to steps

    @precondition(lambda self: self.open.writes)
    @rule(doomed=st.sampled_from([False] * 9 + [True]))
    def launch(self, doomed: bool) -> None:
        while len(self.in_flight) > 1:
            self.the_oldest_step_ends()
        self.open.doomed = doomed
        self.run(self.open, self.memory)
        doomed |= any(step.doomed for step in self.in_flight)
        for _, slot, content in self.open.reads:
            assert self.memory[slot] == content or (doomed and self.memory[slot] == GARBAGE)
        # What free pages hold may not help anybody; until here a copy could still read it.
        for slot in list(self.memory):
            if not self.cache._pools[slot[0]].refcount(slot[1]):
                del self.memory[slot]
        self.in_flight.append(self.open)
        self.open = Step(self.open.number + 1)

    @precondition(lambda self: self.in_flight)
    @rule()
    def the_oldest_step_ends(self) -> None:
        step = self.in_flight.pop(0)
        if step.doomed:
            self.fail(step)
        else:
            self.cache.complete(step.number)

    @precondition(lambda self: self.open.writes and self.open.number % 8 == 0)
    @rule()
    def the_open_step_fails_before_it_runs(self) -> None:
        self.open.doomed = True
        self.run(self.open, self.memory)
        failed, self.open = self.open, Step(self.open.number + 1)
        self.fail(failed)

    def fail(self, step: Step) -> None:
        """Everything that rests on the step is released and computed anew."""
        self.cache.rollback(step.number)
        memory = self.preview()
        for sequence in list(self.sequences):
            slots = self.slots(sequence, 0, sequence.table.num_tokens)
            if any(memory[slot] == GARBAGE for slot, _ in slots):
                self.preempted.append((sequence.root, sequence.tokens))
                self.drop(sequence)

    # What must always hold

    @invariant()
    def every_count_is_right(self) -> None:
        if hasattr(self, "cache"):
            assert_consistent(self.cache, [sequence.table for sequence in self.sequences])

    @invariant()
    def every_table_has_given_back_what_it_sees_no_more(self) -> None:
        if hasattr(self, "cache"):
            for sequence in self.sequences:
                assert sequence.table.num_trimmed == [
                    0 if window is None else max(0, sequence.first - window) // self.cache.page_size
                    for window in self.windows
                ]

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        if not hasattr(self, "cache"):
            return
        memory = self.preview()
        doomed = any(step.doomed for step in self.in_flight)
        for sequence in self.sequences:
            for slot, position in self.slots(sequence, 0, sequence.table.num_tokens):
                content = memory[slot]
                assert content == (sequence.root, tuple(sequence.tokens[: position + 1])) or (
                    doomed and content == GARBAGE
                )

    @invariant()
    def the_tree_holds_what_it_says(self) -> None:
        if not hasattr(self, "cache"):
            return
        memory = self.preview()
        size = self.cache.page_size
        doomed = any(step.doomed for step in self.in_flight)
        for (root, tokens), node in tree_nodes(self.cache).items():
            for group, page in enumerate(node.pages):
                for offset in range(size if page != NO_PAGE else 0):
                    content = memory[group, page, offset]
                    stop = len(tokens) - size + offset + 1
                    assert content == (root, tokens[:stop]) or (
                        doomed and node.step is not None and content == GARBAGE
                    )

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in self.sequences:
            self.cache.release(sequence.table)
        assert_consistent(self.cache, [])
        assert self.cache.stats().in_use == 0
        self.cache.reset_prefix()
        assert self.cache.stats().free == self.cache.stats().total


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=400, stateful_step_count=50)
